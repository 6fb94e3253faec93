"""Gradients are scaled only where that does the same as restoring shares after every step: under plain SGD."""

import functools
from collections import OrderedDict

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.small_runs import make, permuted
from support.strategies import Hears, learn
from support.strategy_state import state
from torch import nn
from torch.optim import optimizer as optim

from avalanche_amnesia.optimizers import traits_of
from avalanche_amnesia.training import HAT, AdaHAT, ConstantRule
from avalanche_amnesia.training.plugins import task_mask
from avalanche_amnesia.training.update_rules import Adjuster


@pytest.fixture
def ways(monkeypatch):
    """Names of the ways in which steps were adjusted."""
    seen: list[str] = []
    after = Adjuster.after_step

    def noting(self):
        seen.extend(["gradient" if self.on_gradients else "update"] if self.names else [])
        after(self)

    monkeypatch.setattr(Adjuster, "after_step", noting)
    return seen


def clips():
    """Clips gradients as late as a plugin can."""
    return Hears(before_update=lambda made: nn.utils.clip_grad_norm_(made.model.parameters(), 0.1))


class Decays(SupervisedPlugin):
    """Lets weights decay from the second epoch of every task on."""

    def before_training_epoch(self, strategy, **kwargs):
        for group in strategy.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (strategy.clock.train_exp_epochs > 0)

    def after_training_exp(self, strategy, **kwargs):
        for group in strategy.optimizer.param_groups:
            group["weight_decay"] = 0.0


@pytest.mark.parametrize("plugin", [clips, Decays])
def test_plugins_that_change_gradients_or_settings_are_noticed(plugin, ways, monkeypatch):
    benchmark, trainings = permuted(n_train=96), []
    for expected in ({"update"} if plugin is clips else {"gradient", "update"}, {"update"}):
        ways.clear()
        trainings.append(state(learn(make(AdaHAT, optimizer="sgd", plugins=[plugin()]), benchmark).model))
        assert set(ways) == expected
        monkeypatch.setattr(task_mask, "traits_of", lambda o: traits_of(o)._replace(linear=False))  # restores shares
    first, second = trainings
    assert all(torch.allclose(first[name].float(), second[name].float(), atol=1e-3) for name in second)


def clipping(optimizer, *args):
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def wrap_step(strategy):
    step = strategy.optimizer.step

    @functools.wraps(step)
    def clipped():
        clipping(strategy.optimizer)
        return step()

    strategy.optimizer.step = clipped


def schedule(strategy):
    torch.optim.lr_scheduler.ExponentialLR(strategy.optimizer, 0.9)


@pytest.mark.parametrize("around", [wrap_step, lambda _: optim.register_optimizer_step_pre_hook(clipping), schedule])
def test_changes_around_a_step_are_noticed(around, ways, monkeypatch):
    monkeypatch.setattr(optim, "_global_optimizer_pre_hooks", OrderedDict())
    strategy = make(AdaHAT, optimizer="sgd")
    around(strategy)
    learn(strategy, permuted(n_train=96).train_stream)
    assert set(ways) == {"gradient" if around is schedule else "update"}


@pytest.mark.parametrize(("optimizer", "value"), [("sgd", -0.0), ("adam", 1e-35)])
def test_a_frozen_entry_that_a_zero_gradient_would_change_is_restored(value, optimizer, ways):
    benchmark = permuted(n_train=96)
    strategy = learn(make(HAT, optimizer=optimizer), benchmark.train_stream[:1])
    weight = next(iter(strategy.model.backbone.parameters()))
    weight.data[:, 0] = value
    used = strategy.model.masks[0][next(iter(strategy.model.masks[0]))]
    before = weight.detach()[used].clone().view(torch.int32)
    assert len(before)
    strategy.train(benchmark.train_stream[1])
    assert set(ways) == {"update"}
    assert torch.equal(weight.detach()[used].view(torch.int32), before)


@pytest.mark.parametrize("rule", [{"adjustment": ConstantRule(alpha=0.3)}, {"adjustment": "random"}])
def test_partial_rates_scale_gradients_only_under_plain_sgd(rule, ways):
    for optimizer in ("sgd", "adam", "momentum"):
        learn(make(HAT, optimizer=optimizer, **rule), permuted(n_train=32).train_stream)
        assert set(ways) == {"gradient" if optimizer == "sgd" else "update"}
        ways.clear()
