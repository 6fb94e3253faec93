"""The ablations ``rate`` and ``draft``: scaled updates and their removal."""

import pytest
import torch
from support.fault_injection import raiser
from support.strategies import DIGITS, amnesiac, stock, trained
from support.strategy_state import (
    assert_nothing_stray,
    bits,
    fingerprint,
    mark,
    trajectory,
    unlearning_plugin,
    values,
)

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.shadows.shadow import first_used
from avalanche_amnesia.training import PAPER_ALPHA, AdaHATRule
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.update_rules import TaskUse
from experiments.scaled_updates import ScaledUpdatesPlugin

PERMUTED = PermutedDigits(4, n_train=400, n_test=100)
NAMES = ["rate", "draft"]


def learned(n_tasks=3, by="rate", adjustment="adahat", **options):
    """Return a strategy with scaled updates; None: only deletion."""
    compensation = "none" if by is None else ScaledUpdatesPlugin(by)
    options = {"compensation": compensation, "adjustment": adjustment, **options}
    return trained(n_tasks, PERMUTED, train_epochs=1, **options)


@pytest.mark.parametrize("compensation", NAMES)
@pytest.mark.parametrize("adjustment", ["hat", "constant"])
def test_undamped_updates_are_not_scaled(compensation, adjustment):
    """HAT changes no used entries; a constant rate of 1 damps no update."""
    plain, ours = (learned(by=by, adjustment=adjustment) for by in (None, compensation))
    assert plain.unlearn([0]).plan.entries == ours.unlearn([0]).plan.entries
    a, b = values(plain.model.backbone), values(ours.model.backbone)
    tolerance = 0 if adjustment == "hat" else 1e-6
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in a)
    if adjustment == "hat":
        assert bits(plain.model) == bits(ours.model)


def test_the_next_tasks_update_is_divided_by_the_rate_that_damped_it():
    strategy, plain = learned(2), learned(2, None)
    use = TaskUse(learned(1).model)  # before task 1
    rule = find_plugin(strategy, HATPlugin).rule
    before, trained = (
        trajectory(plain).values_before(1, dict(plain.model.named_parameters())),
        values(plain.model.backbone),
    )
    region, moved = first_used(strategy.model, 0, []), trajectory(strategy).moved(1)
    plain.unlearn([0])
    assert strategy.unlearn([0]).plan.compensated == (1,)
    unscaled = values(plain.model.backbone)
    scaled = 0
    for name, value in values(strategy.model.backbone).items():
        where = region[name] & moved[f"backbone.{name}"]
        update = trained[name].double() - before[f"backbone.{name}"].double()
        rate = (1 - rule.protected_share(use, name, 0.0)).double()
        wanted = unscaled[name].double() - update + update / rate
        assert torch.allclose(value[where].double(), wanted[where], rtol=0, atol=2e-4)  # rates are kept in float16
        assert same_bits(value, unscaled[name])[~where].all()
        scaled += int(((rate < 0.2) & where & (update.abs() > 1e-6)).sum())
    assert scaled > 50


@pytest.mark.parametrize(("alpha", "factor"), [(None, 1e-2), (0.5, 0.5)])
def test_draft_multiplies_updates_by_alpha(alpha, factor):
    strategy, plain = learned(2, compensation=ScaledUpdatesPlugin("draft", alpha=alpha)), learned(2, None)
    before = trajectory(plain).values_before(1, dict(plain.model.named_parameters()))
    trained, region, moved = values(plain.model.backbone), first_used(plain.model, 0, []), trajectory(plain).moved(1)
    plain.unlearn([0])
    strategy.unlearn([0])
    for name, unscaled in values(plain.model.backbone).items():
        where = region[name] & moved[f"backbone.{name}"]
        update = (trained[name].double() - before[f"backbone.{name}"].double())[where]
        wanted = unscaled[where].double() + (factor - 1) * update
        assert torch.allclose(values(strategy.model.backbone)[name][where].double(), wanted, rtol=0, atol=1e-6)


def test_only_the_first_remaining_task_is_scaled():
    strategy = learned(4)
    revisions = find_plugin(strategy, ScaledUpdatesPlugin).revise(strategy.model, trajectory(strategy), [0])
    assert 1 in revisions
    for name in values(strategy.model.backbone):
        where = [
            of_task[f"backbone.{name}"].where.int() for of_task in revisions.values() if f"backbone.{name}" in of_task
        ]
        assert sum(where).max() == 1
        earlier = trajectory(strategy).moved(1).get(f"backbone.{name}")
        for task in {2, 3} & revisions.keys():
            if f"backbone.{name}" in revisions[task]:
                assert not bool((revisions[task][f"backbone.{name}"].where & earlier).any())


@pytest.mark.parametrize("compensation", NAMES)
@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("requests", [[[0], [1], [2, 3]], [[1, 2], [0], [3]]])
def test_scaled_updates_are_removed_without_trace(compensation, dtype, requests):
    strategy = amnesiac(
        compensation=ScaledUpdatesPlugin(compensation),
        adjustment="adahat",
        train_epochs=1,
        trajectory=TrajectoryPlugin(dtype=dtype),
    )
    assert_nothing_stray(strategy, PERMUTED.train_stream, requests)
    assert find_plugin(strategy, ScaledUpdatesPlugin).rates == {}


@pytest.mark.parametrize("compensation", NAMES)
@pytest.mark.parametrize("requests", [[[1], [0]], [[0, 2]]])
def test_the_coefficient_of_an_unlearned_update_is_zero(compensation, requests):
    plain, marked = (learned(4, compensation) for _ in range(2))
    for task in {task for request in requests for task in request}:
        mark(marked, task, size=1.0)
    for strategy in (plain, marked):
        for request in requests:
            strategy.unlearn(request)
    a, b = values(plain.model.backbone), values(marked.model.backbone)
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=2e-4) for name in a)


def test_a_failed_unlearning_changes_nothing(monkeypatch):
    strategy = learned()
    plugin = find_plugin(strategy, ScaledUpdatesPlugin)
    before, rates = fingerprint(strategy), plugin.rates
    monkeypatch.setattr(unlearning_plugin(strategy).ledger, "forget", raiser(MemoryError))
    with pytest.raises(MemoryError, match="injected"):
        strategy.unlearn([1])
    assert fingerprint(strategy) == before
    assert plugin.rates is rates


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
