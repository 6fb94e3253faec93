"""Pruned updates: what does not move far, or often, returns; the log stays lossless and the claim as it was."""

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
    """Keeps every step's weights, slowly."""

    def before_training_exp(self, strategy, **kwargs):
        self.steps = [values(strategy.model)]

    def after_update(self, strategy, **kwargs):
        self.steps.append(values(strategy.model))

    def share(self, name):
        moved = [(a[name] != b[name]).double() for a, b in zip(self.steps[:-1], self.steps[1:], strict=True)]
        return torch.stack(moved).mean(0)


def assert_return(little, plugin):
    """Entries that moved little in a task's training return to where they were, and no others do."""
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
@pytest.mark.parametrize("adjustment", ["hat", "adahat"])
def test_a_pruned_log_leaves_nothing_behind_and_keeps_the_claim(options, adjustment):
    kept, of_all = PrunedTrajectoryPlugin(**options), {"adjustment": adjustment, "optimizer": "sgd"}
    strategy, lossless = trained(3, trajectory=kept, **of_all), trained(3, **of_all)
    assert_economical(strategy, lossless, initial_values(amnesiac().model))


def test_entries_that_a_task_hardly_moved_return():
    def hardly_moved(watch, name):
        return (watch.steps[-1][name].double() - watch.steps[0][name].double()).abs() < 0.002

    assert_return(hardly_moved, PrunedTrajectoryPlugin(threshold=0.002))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0.0}, r"threshold must be above 0, got 0.0"),
        ({"threshold": math.nan}, "threshold must be"),
        ({"min_active_steps": 1.5}, r"min_active_steps must be a share.*got 1.5"),
        ({"min_active_steps": 0}, "min_active_steps must be"),
    ],
)
def test_options_that_are_not_allowed(options, words):
    with pytest.raises(ValueError, match=words):
        PrunedTrajectoryPlugin(**options)


def test_entries_that_move_in_few_steps_return():
    assert_return(lambda watch, name: watch.share(name) < 0.8, PrunedTrajectoryPlugin(min_active_steps=0.8))


def test_what_an_unlearning_moves_is_no_step():
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
