"""Ablations of updates: scaled by ``rate`` or ``draft``, or pruned; their logs are removed without trace."""

import math
from collections import Counter

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.strategies import DIGITS, amnesiac, stock, trained
from support.strategy_state import (
    assert_economical,
    assert_marks_go,
    bits,
    fingerprint,
    initial_values,
    mark,
    trajectory,
    values,
)

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.shadows.shadow import first_used
from avalanche_amnesia.training import PAPER_ALPHA, AdaHATRule
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.update_rules import TaskUse
from experiments.pruned_updates import PrunedTrajectoryPlugin
from experiments.scaled_updates import ScaledUpdatesPlugin

PERMUTED = PermutedDigits(4, n_train=400, n_test=100)
NAMES = ["rate", "draft"]


def learned(n_tasks=3, by="rate", adjustment="adahat", **options):
    """Return a strategy with scaled updates; None: only deletion."""
    compensation = "none" if by is None else ScaledUpdatesPlugin(by)
    options = {"compensation": compensation, "adjustment": adjustment, **options}
    return trained(n_tasks, PERMUTED, train_epochs=1, **options)


@pytest.mark.parametrize("compensation", NAMES)
def test_undamped_updates_are_not_scaled(compensation):
    """HAT changes no used entries."""
    plain, ours = (learned(by=by, adjustment="hat") for by in (None, compensation))
    assert plain.unlearn([0]).plan.entries == ours.unlearn([0]).plan.entries
    assert bits(plain.model) == bits(ours.model)


@pytest.mark.parametrize(("by", "atol"), [("rate", 2e-4), ("draft", 1e-6)])  # rates are kept in float16
def test_the_next_tasks_update_is_divided_by_the_rate_that_damped_it_or_multiplied_by_alpha(by, atol):
    strategy, plain = learned(2, compensation=ScaledUpdatesPlugin(by, alpha=0.5)), learned(2, None)
    use = TaskUse(learned(1).model)  # before task 1
    rule = find_plugin(strategy, HATPlugin).rule
    before = trajectory(plain).values_before(1, dict(plain.model.named_parameters()))
    trained = values(plain.model.backbone)
    region, moved = first_used(strategy.model, 0, []), trajectory(strategy).moved(1)
    plain.unlearn([0])
    assert strategy.unlearn([0]).plan.compensated == (1,)
    unscaled = values(plain.model.backbone)
    scaled = 0
    for name, value in values(strategy.model.backbone).items():
        where = region[name] & moved[f"backbone.{name}"]
        update = trained[name].double() - before[f"backbone.{name}"].double()
        rate = (1 - rule.protected_share(use, name, 0.0)).double()
        wanted = unscaled[name].double() - update + (update / rate if by == "rate" else update * 0.5)
        assert torch.allclose(value[where].double(), wanted[where], rtol=0, atol=atol)
        assert same_bits(value, unscaled[name])[~where].all()
        scaled += int(((rate < 0.2) & where & (update.abs() > 1e-6)).sum())
    assert scaled > 50


@pytest.mark.parametrize("compensation", NAMES)
def test_the_coefficient_of_an_unlearned_update_is_zero(compensation):
    plain, marked = (learned(4, compensation) for _ in range(2))
    for task in (0, 1):
        mark(marked, task, size=1.0)
    assert_marks_go(plain, marked, [[1], [0]], atol=2e-4)


def test_the_alpha_of_the_paper_is_finite_and_two_compensations_are_refused():
    strategy = learned(2, adjustment=AdaHATRule(alpha=PAPER_ALPHA))
    strategy.unlearn([0])
    assert all(bool(value.isfinite().all()) for value in values(strategy.model.backbone).values())
    both = learned(2, plugins=[ScaledUpdatesPlugin("draft")])
    before = fingerprint(both)
    with pytest.raises(ValueError, match="two compensations revise what task 1 wrote"):
        both.unlearn([0])
    assert fingerprint(both) == before


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="must be one of"):
        ScaledUpdatesPlugin("twice")
    with pytest.raises(ValueError, match="alpha must be above 0"):
        ScaledUpdatesPlugin("draft", alpha=0)
    with pytest.raises(ValueError, match="needs HATPlugin"):
        stock(plugins=[ScaledUpdatesPlugin()]).train(DIGITS.train_stream[0])
    for options, words in (
        ({"threshold": 0.0}, r"threshold must be above 0, got 0.0"),
        ({"threshold": math.nan}, "threshold must be"),
        ({"min_active_steps": 1.5}, r"min_active_steps must be a share.*got 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            PrunedTrajectoryPlugin(**options)


class Watch(SupervisedPlugin):
    """Keeps the weights of every step."""

    def before_training_exp(self, strategy, **kwargs):
        self.steps = [values(strategy.model)]

    def after_update(self, strategy, **kwargs):
        self.steps.append(values(strategy.model))

    def share(self, name):
        moved = [(a[name] != b[name]).double() for a, b in zip(self.steps[:-1], self.steps[1:], strict=True)]
        return torch.stack(moved).mean(0)


def assert_return(little, plugin):
    """Check that exactly the entries with small changes are reset after a task."""
    watch, returned = Watch(), Counter()
    strategy = amnesiac(trajectory=plugin, plugins=[watch], optimizer="sgd")
    for experience in DIGITS.train_stream[:2]:
        strategy.train(experience)
        for name, parameter in strategy.model.named_parameters():
            if name.startswith("backbone."):
                before, after, pruned = watch.steps[0][name], watch.steps[-1][name], little(watch, name)
                assert same_bits(parameter.detach(), before)[pruned].all()
                returned["pruned"] += int((pruned & ~same_bits(before, after)).sum())
                kept = ~pruned & (parameter.detach() != before)
                assert torch.equal(parameter.detach()[kept], after[kept])
                returned["kept"] += int(kept.sum())
    assert returned["pruned"] > 0
    assert returned["kept"] > 0


def test_a_pruned_log_is_removed_without_trace_and_keeps_the_claim():
    kept = PrunedTrajectoryPlugin(threshold=0.01, min_active_steps=0.3, dtype=torch.bfloat16)
    of_all = {"adjustment": "adahat", "optimizer": "sgd"}
    strategy, lossless = trained(3, trajectory=kept, **of_all), trained(3, **of_all)
    assert_economical(strategy, lossless, initial_values(amnesiac().model))


def test_entries_with_small_or_rare_changes_are_reset():
    def hardly_moved(watch, name):
        return (watch.steps[-1][name].double() - watch.steps[0][name].double()).abs() < 0.002

    assert_return(hardly_moved, PrunedTrajectoryPlugin(threshold=0.002))
    assert_return(lambda watch, name: watch.share(name) < 0.8, PrunedTrajectoryPlugin(min_active_steps=0.8))
