"""Norms of a task: where they start, when they change, their statistics, and how they are unlearned."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from support.small_networks import lived_in
from support.strategies import Hears, TwoNorms, learn, make
from support.strategy_state import same_state, state
from torch import nn

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training.host.lookup import find_plugin
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
