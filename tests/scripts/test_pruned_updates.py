"""Pruned updates: entries with small or rare changes are reset; the log stays lossless and the claim unchanged."""

import math
from collections import Counter

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.strategies import DIGITS, amnesiac, trained
from support.strategy_state import assert_economical, initial_values, values

from avalanche_amnesia.bits import same_bits
from experiments.pruned_updates import PrunedTrajectoryPlugin, StepActivity


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


PRUNED = [
    {"threshold": 0.02},
    {"min_active_steps": 0.7},
    {"threshold": 0.01, "min_active_steps": 0.3, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", PRUNED, ids=str)
@pytest.mark.parametrize("adjustment", ["adahat"])
def test_a_pruned_log_is_removed_without_trace_and_keeps_the_claim(options, adjustment):
    kept, of_all = PrunedTrajectoryPlugin(**options), {"adjustment": adjustment, "optimizer": "sgd"}
    strategy, lossless = trained(3, trajectory=kept, **of_all), trained(3, **of_all)
    assert_economical(strategy, lossless, initial_values(amnesiac().model))


def test_entries_with_small_or_rare_changes_are_reset():
    def hardly_moved(watch, name):
        return (watch.steps[-1][name].double() - watch.steps[0][name].double()).abs() < 0.002

    assert_return(hardly_moved, PrunedTrajectoryPlugin(threshold=0.002))
    assert_return(lambda watch, name: watch.share(name) < 0.8, PrunedTrajectoryPlugin(min_active_steps=0.8))


def test_wrong_arguments_are_refused():
    for options, words in (
        ({"threshold": 0.0}, r"threshold must be above 0, got 0.0"),
        ({"threshold": math.nan}, "threshold must be"),
        ({"min_active_steps": 1.5}, r"min_active_steps must be a share.*got 1.5"),
        ({"min_active_steps": 0}, "min_active_steps must be"),
    ):
        with pytest.raises(ValueError, match=words):
            PrunedTrajectoryPlugin(**options)


def test_changes_between_steps_do_not_count_as_activity():
    model = torch.nn.Linear(2, 1)
    activity = StepActivity(model)
    for step in range(5):
        activity.before_step()
        with torch.no_grad():
            model.bias += float(step < 4)
        activity.after_step()
        with torch.no_grad():
            model.weight += 1.0
    assert activity.share()["bias"].tolist() == [0.8]
    assert activity.share()["weight"].tolist() == [[0.0, 0.0]]
