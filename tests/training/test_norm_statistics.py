"""Running statistics of a task's norms are taken again at its end."""

from functools import partial

import pytest
import torch
from avalanche.training.plugins import ReplayPlugin
from support.strategies import Hears, TwoNorms, learn, make
from torch import nn
from torch.optim import Adam

from avalanche_amnesia import HAT, HardAttention, MaskedModel, SplitDigits
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin

DIGITS = SplitDigits(n_train=200, n_test=60)


def kept_in(batches):
    """Every mini-batch that the network is given, kept in a list."""
    return Hears(after_forward=lambda made: batches.append((made.mb_x, made.mb_task_id)))


def shift(strategy):
    """Change the network's input, as transforms on the device do."""
    strategy.mbatch[0] = strategy.mbatch[0] * 2 + 1


def strategy_of(seed=0, norm=nn.BatchNorm2d, of_model=None, **options):
    wrap, adam = partial(MaskedModel, **{"input_shape": (1, 8, 8), **(of_model or {})}), partial(Adam, lr=3e-3)
    options = {"train_mb_size": 16, "seed": seed, **options}
    return make(HAT, net=partial(TwoNorms, norm), wrap=wrap, optimizer=adam, torch_seed=seed, **options)


def statistics(model, task, norm="norm1"):
    own = model.task_parts(task)[norm]
    return own.running_mean, own.running_var


@pytest.mark.parametrize("n_batches", [1, 3])
def test_running_statistics_are_the_average_over_the_last_batches(n_batches):
    seen = []
    plugins = [Hears(before_training_iteration=shift), kept_in(seen), ReplayPlugin(mem_size=20)]
    masks = HardAttention(statistics_batches=n_batches)
    strategy = learn(strategy_of(masks=masks, plugins=plugins), DIGITS, 2)
    model = strategy.model
    assert any((labels != 1).any() for _, labels in seen[-n_batches:])
    mask = model.masks[1]["conv1"]
    own = [x[labels == 1] for x, labels in seen[-n_batches:]]
    maps = [model.backbone.conv1(x)[:, mask].detach() for x in own if len(x) > 1]
    mean, var = statistics(model, 1)
    assert torch.allclose(mean[mask], torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0), atol=1e-5)
    assert torch.allclose(var[mask], torch.stack([m.var((0, 2, 3)) for m in maps]).mean(0), rtol=1e-4)
    assert 0 < mask.sum() < len(mask)
    assert torch.equal(mean[~mask], torch.zeros_like(mean[~mask]))
    assert torch.equal(var[~mask], torch.ones_like(var[~mask]))
    assert model.task_parts(1)["norm1"].momentum == 0.1
    assert not model.task_parts(1)["norm1"]._forward_pre_hooks
    assert not hasattr(find_plugin(strategy, HATPlugin), "_statistics")  # it holds samples


def test_only_running_statistics_change():
    """With and without: the same weights, masks, heads and random stream, to the bit."""
    states, draws = [], []
    for n_batches in (0, 5):
        strategy = learn(strategy_of(masks=HardAttention(statistics_batches=n_batches)), DIGITS.train_stream[:2])
        states.append({n: v for n, v in strategy.model.state_dict().items() if "num_batches" not in n})
        draws.append(torch.rand(1))
    differing = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    assert states[0].keys() == states[1].keys()
    assert {name.rpartition(".")[2] for name in differing} == {"running_mean", "running_var"}
    assert torch.equal(*draws)


@pytest.mark.parametrize("norm", [lambda n: nn.InstanceNorm2d(n, track_running_stats=True), nn.BatchNorm2d])
def test_statistics_of_instance_norms_and_of_norms_inside_task_owned_modules_are_averaged(norm):
    """Instance norms, and norms inside a module that each task copies."""
    declared = {"task_owned": ["conv1", "norm1"]} if norm is nn.BatchNorm2d else {}
    seen, masks = [], HardAttention(statistics_batches=2)
    strategy = learn(strategy_of(norm=norm, masks=masks, of_model=declared, plugins=[kept_in(seen)]), DIGITS, 1)
    model = strategy.model
    conv = model.task_parts(0)["conv1"] if declared else model.backbone.conv1
    means = torch.stack([conv(x).mean((0, 2, 3)) for x, _ in seen[-2:]]).mean(0)
    used = slice(None) if declared else model.masks[0]["conv1"]
    assert torch.allclose(statistics(model, 0)[0][used], means[used], atol=1e-5)
