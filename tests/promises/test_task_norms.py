"""Norms of a task: where they start, when they change, statistics, which are taken again at its end, and unlearning."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from avalanche.training.plugins import ReplayPlugin
from support.small_networks import lived_in
from support.strategies import Hears, TwoNorms, learn, make
from support.strategy_state import same_state, state
from torch import nn

from avalanche_amnesia import HAT, HardAttention
from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec, TaskBatchNorm, TaskGroupNorm, TaskLayerNorm

DIGITS = SplitDigits(n_train=200, n_test=60)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS = {
    "batch": nn.BatchNorm2d,
    "batch, no statistics": lambda n: nn.BatchNorm2d(n, track_running_stats=False),
    "batch, not affine": lambda n: nn.BatchNorm2d(n, affine=False),
    "instance": lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True),
    "group": lambda n: nn.GroupNorm(2, n),
    "layer": LayerNorm2d,
}


def build(kind="batch", seed=0, **options):
    torch.manual_seed(seed)
    net = TwoNorms(NORMS[kind])
    for norm in (net.norm1, net.norm2):  # as if trained before: at 0 and 1 much would be invisible
        lived_in(norm)
    return MaskedModel(net, input_shape=(1, 8, 8), **options)


def amnesiac(model, **options):
    optimizer = partial(torch.optim.Adam, lr=3e-3, weight_decay=5e-4)
    return make(model=model, optimizer=optimizer, train_mb_size=32, seed=0, **options)


def own(model, task):
    return state(model.task_parts(task))


def of_backbone(model):
    return {name: value for name, value in state(model.backbone).items() if name.startswith("norm")}


def batch(n=16, task=0):
    return DIGITS.test_stream[task].tensors[0][:n]


# From a task's first step to its unlearning -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", NORMS)
def test_every_task_starts_from_the_backbone_s_norms_and_changes_only_its_own_open_units(kind):
    strategy, kept = amnesiac(build(kind)), {}
    model, initial = strategy.model, of_backbone(strategy.model)
    for task in range(2):
        starts = {}

        def look(made, starts=starts, task=task):
            starts.update(own(made.model, task))

        strategy.plugins.append(Hears(before_training_exp=look))
        strategy.train(DIGITS.train_stream[task])
        strategy.plugins.pop()
        for name, value in starts.items():
            if not name.endswith("num_batches_tracked"):
                assert torch.equal(value, initial[name]), name
        for earlier, values in kept.items():
            assert same_state(own(model, earlier), values)
        kept[task] = own(model, task)
        if kind != "batch, no statistics":
            assert not same_state(kept[task], starts)
    assert same_state(of_backbone(model), initial)
    for layer, norm in (("conv1", "norm1"), ("conv2", "norm2")):
        mask = model.masks[0][layer]
        assert not mask.all()
        for name, value in kept[0].items():
            if name.startswith(norm) and value.dim():
                assert torch.equal(value[~mask], initial[name][~mask])


def test_norms_of_an_unlearned_task_are_gone():
    strategy = amnesiac(build())
    model = strategy.model
    learn(strategy, DIGITS.train_stream[:3])
    gone = [weakref.ref(module) for module in model.task_parts(1).modules()]
    gone += [weakref.ref(parameter) for parameter in model.task_parts(1).parameters()]
    record = strategy.unlearn([1])
    assert "heads.1.own.norm1.running_mean" in record.plan.removed
    assert "heads.1.own.norm1.weight" in record.plan.removed
    assert [name for name in model.state_dict() if ".1.own." in name] == []
    assert [name for name in strategy.optimized_param_id if ".1.own." in name] == []
    known = {id(p) for p in model.parameters()}
    assert all(id(p) in known for group in strategy.optimizer.param_groups for p in group["params"])
    logs = find_plugin(strategy, TrajectoryPlugin).trajectory.logs
    assert [name for log in logs.values() for name in log if ".own." in name] == []
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []
    before = own(model, 2)
    strategy.train(DIGITS.train_stream[1])  # learned again: from the backbone's values
    assert same_state(own(model, 2), before)


# Statistics -------------------------------------------------------------------------------------------------------


def naive_layer(x, mask, weight, bias, eps, centred):
    """Row by row, over the open entries alone."""
    result = torch.zeros_like(x)
    for row in range(len(x)):
        values = [float(x[row, i]) for i in range(x.shape[1]) if mask[i]]
        mean = sum(values) / len(values) if centred else 0.0
        variance = sum((v - mean) ** 2 for v in values) / len(values)
        for i in range(x.shape[1]):
            if mask[i]:
                result[row, i] = (float(x[row, i]) - mean) / math.sqrt(variance + eps) * float(weight[i]) + float(
                    0.0 if bias is None else bias[i]
                )
    return result


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_layer_statistics_are_those_of_the_open_units(centred):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 9, generator=generator, dtype=torch.float64) * 3 + 2
    weight = torch.rand(9, generator=generator, dtype=torch.float64) + 0.5
    bias = torch.randn(9, generator=generator, dtype=torch.float64) if centred else None
    names = ("w", None if bias is None else "b")
    spec = OwnedSpec("n", names, "layer" if centred else "rms", eps=1e-5, shape=(9,))
    norm = TaskLayerNorm(spec, {"w": weight, "b": bias})
    for mask in (torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1]), torch.ones(9), torch.eye(9)[4]):
        mask = mask.double()
        expected = naive_layer(x * mask, mask, weight, bias, 1e-5, centred)
        assert torch.allclose(norm(x * mask, mask), expected, atol=1e-12)
    assert torch.allclose(norm(x, None), naive_layer(x, torch.ones(9), weight, bias, 1e-5, centred), atol=1e-12)


def test_group_statistics_are_those_of_the_open_channels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 2, 2, generator=generator, dtype=torch.float64) * 3 + 2
    weight, bias = torch.rand(2, 6, generator=generator, dtype=torch.float64)
    norm = TaskGroupNorm(OwnedSpec("n", ("w", "b"), "group", eps=1e-5, groups=2), {"w": weight, "b": bias})
    for mask in (torch.tensor([1, 0, 1, 0, 0, 1]), torch.ones(6), torch.tensor([1, 1, 1, 0, 0, 0])):
        mask = mask.double()
        inside = x * mask[:, None, None]
        expected = torch.zeros_like(x)
        for group in (slice(0, 3), slice(3, 6)):
            flat = inside[:, group].flatten(1)
            repeated = [values[group].repeat_interleave(4) for values in (mask, weight, bias)]
            if repeated[0].any():
                expected[:, group] = naive_layer(flat, *repeated, 1e-5, True).reshape(3, 3, 2, 2)
        assert torch.allclose(norm(inside, mask), expected, atol=1e-12)


@pytest.mark.parametrize(("momentum", "dtype"), [(0.37, torch.float32), (None, torch.float64)])
def test_batch_norm_equals_that_of_torch(momentum, dtype):
    theirs = nn.BatchNorm2d(4, momentum=momentum, dtype=dtype)
    names, statistics = ("weight", "bias"), ("running_mean", "running_var")
    spec = OwnedSpec("n", names, "batch", eps=theirs.eps, momentum=momentum, statistics=statistics)
    ours = TaskBatchNorm(spec, dict((*theirs.named_parameters(), *theirs.named_buffers())))
    for _ in range(3):
        x = torch.randn(6, 4, 3, 3, dtype=dtype) * 2 + 1
        assert torch.equal(ours(x, None), theirs(x))
        assert same_state(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    ours.eval(), theirs.eval()
    assert torch.equal(ours(x, None), theirs(x))
    half = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert torch.allclose(ours(x, half), theirs(x) * half[:, None, None].to(dtype), atol=1e-6)


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_norms_over_the_batch_keep_no_state_of_a_task(kind):
    strategy = amnesiac(build(kind, norm="batch"))
    model = strategy.model
    learn(strategy, DIGITS.train_stream[:2])
    assert [name for name in model.state_dict() if name.startswith("own.")] == []
    model.eval()
    with torch.no_grad():
        expected, fewer = model(batch(16), 0), model(batch(8), 0)
        model.backbone.norm1.running_mean += 5
        model.backbone.norm2.running_var *= 3
        assert torch.equal(model(batch(16), 0), expected)
        alike = torch.allclose(fewer, expected[:8], atol=1e-4)
        assert alike == (kind == "instance")  # the statistics of the batch at hand, or of the one sample
    strategy.unlearn([0, 1])
    assert model.tasks == ()


def kept_in(batches):
    """Every mini-batch that the network is given, kept in a list."""
    return Hears(after_forward=lambda made: batches.append((made.mb_x, made.mb_task_id)))


def shift(strategy):
    """Change the network's input, as transforms on the device do."""
    strategy.mbatch[0] = strategy.mbatch[0] * 2 + 1


def strategy_of(seed=0, norm=nn.BatchNorm2d, of_model=None, **options):
    wrap, adam = (
        partial(MaskedModel, **{"input_shape": (1, 8, 8), **(of_model or {})}),
        partial(torch.optim.Adam, lr=3e-3),
    )
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
