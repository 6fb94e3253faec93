"""Freezing entries by scaled gradients gives the same training as restoring them after every step."""

import functools
from collections import OrderedDict

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.small_runs import logits_of, make, permuted
from support.strategies import Hears, learn
from support.strategy_state import same_state, state
from torch import nn
from torch.optim import optimizer as optim

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.optimizers import traits_of
from avalanche_amnesia.training import HAT, WSN, AdaHAT, ConstantRule
from avalanche_amnesia.training.adjuster import Adjuster
from avalanche_amnesia.training.plugins import task_mask

FAST = ["sgd", "adam", "fused adam"]
SLOW = ["momentum", "adamw", "adam decay"]


class SmallConv(nn.Module):
    """Two convolutions with BatchNorm over 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x.view(-1, 1, 8, 8))))
        return torch.relu(self.norms[1](self.second(x))).mean((2, 3))


def masked_conv() -> MaskedModel:
    torch.manual_seed(0)
    return MaskedModel(SmallConv(), input_shape=(64,))


def resting_nowhere(optimizer):
    """Traits of an optimizer that make every entry be restored after the step."""
    return traits_of(optimizer)._replace(zero_rests=False, linear=False)


KINDS = {
    "hat": lambda **o: make(HAT, **o),
    "hat conv": lambda **o: make(HAT, model=masked_conv(), **o),
    "adahat": lambda **o: make(AdaHAT, **o),
    "wsn": lambda **o: make(WSN, **o),
}


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


def state_and_logits(make_strategy, benchmark, **options):
    strategy = learn(make_strategy(**options), benchmark)
    return state(strategy.model), logits_of(strategy, benchmark, range(3))


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *(("hat", optimizer) for optimizer in ("sgd", "adam", *SLOW)),
        *(("hat conv", "fused adam"), ("wsn", "adam"), ("adahat", "sgd"), ("adahat", "adam")),
    ],
)
def test_scaled_gradients_and_restored_entries_give_the_same_training(kind, optimizer, ways, monkeypatch):
    benchmark = permuted(n_train=96)
    fast, old = state_and_logits(KINDS[kind], benchmark, optimizer=optimizer)
    assert set(ways) == {"gradient" if optimizer in FAST and (kind, optimizer) != ("adahat", "adam") else "update"}
    ways.clear()
    monkeypatch.setattr(task_mask, "traits_of", resting_nowhere)
    slow, expected = state_and_logits(KINDS[kind], benchmark, optimizer=optimizer)
    assert set(ways) == {"update"}
    if kind == "adahat":  # shares between 0 and 1 are rounded otherwise
        assert all(torch.allclose(fast[name].float(), slow[name].float(), atol=1e-3) for name in slow)
        return
    assert same_state(fast, slow)
    assert all(torch.equal(old[task], expected[task]) for task in expected)


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


@pytest.mark.parametrize(("plugin", "optimizer"), [(clips, "sgd"), (Decays, "adam")])
def test_plugins_that_change_gradients_or_settings_are_noticed(plugin, optimizer, ways, monkeypatch):
    benchmark = permuted(n_train=96)
    fast, _ = state_and_logits(KINDS["hat"], benchmark, optimizer=optimizer, plugins=[plugin()])
    assert set(ways) == ({"update"} if plugin is clips else {"gradient", "update"})
    monkeypatch.setattr(task_mask, "traits_of", resting_nowhere)
    slow, _ = state_and_logits(KINDS["hat"], benchmark, optimizer=optimizer, plugins=[plugin()])
    assert same_state(fast, slow)


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


def hook_all(strategy):
    optim.register_optimizer_step_pre_hook(clipping)


@pytest.mark.parametrize("around", [wrap_step, hook_all, schedule])
def test_changes_around_a_step_are_noticed(around, ways, monkeypatch):
    monkeypatch.setattr(optim, "_global_optimizer_pre_hooks", OrderedDict())
    benchmark, trainings = permuted(n_train=96), []
    for way in ("gradient" if around is schedule else "update", "update"):
        ways.clear()
        strategy = make(HAT, optimizer="adam")
        around(strategy)
        trainings.append(state(learn(strategy, benchmark.train_stream).model))
        assert set(ways) == {way}
        optim._global_optimizer_pre_hooks.clear()
        monkeypatch.setattr(task_mask, "traits_of", resting_nowhere)
    assert same_state(*trainings)


def test_with_kept_moments_or_hooks_entries_are_restored_after_the_step(ways):
    benchmark = permuted(n_train=96)
    learn(make(HAT, optimizer="adam", reset_optimizer=False), benchmark.train_stream)
    assert set(ways) == {"update"}
    ways.clear()
    strategy = make(HAT, optimizer="sgd")
    strategy.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    learn(strategy, benchmark.train_stream)
    assert set(ways) == {"update"}


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
