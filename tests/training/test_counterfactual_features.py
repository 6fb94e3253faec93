"""Features of a task without other tasks equal those of a pass over all units, statistics included."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import small_networks
from support.small_networks import L, last_state, parts
from support.strategy_state import bits
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import head_fit
from avalanche_amnesia.training.head_fit import CounterfactualFeatures
from avalanche_amnesia.training.norm_statistics import retake, running_norms

GRU = {"r": lambda: nn.GRU(6, 6, batch_first=True)}
RECURRENT = parts(lambda s, x: last_state(s, torch.relu(s.inner(x))), inner=L(4, 6), out=L(6, 4), **GRU)
NAMES = ["lenet", "residual 1x1", "concatenated maps", "grouped", "batch norm", "embedding", "squeeze and excite"]
NETWORKS = {name: small_networks.ALL[name] for name in NAMES} | {
    "mlp": (lambda: MLP(20, hidden=(16, 12), features=8), (20,), {}),
    "the batch's statistics": (*small_networks.ALL["batch norm"][:2], {"input_shape": (1, 3, 3), "norm": "batch"}),
    "frozen": (RECURRENT, (5, 4), {"input_shape": (5, 4), "frozen": ["r"]}),
    "task-owned": (RECURRENT, (5, 4), {"input_shape": (5, 4), "task_owned": ["r"]}),
}
HALF, STARVED = 0, 1


def embedding(model: MaskedModel, task: int, seed: int) -> torch.Tensor:
    """Open half of the units, and at least one of each layer; or only one of each third layer, and none of one."""
    values = torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed + task)) - 0.5
    layers = list(model.by_layer(values).values())
    for layer in layers:
        layer[-1] = 1.0
    if task == STARVED:
        for layer in layers[::3]:
            layer[:-1] = -1.0
        layers[len(layers) // 2].fill_(-1.0)
    return values


@torch.no_grad()
def with_tasks(model: MaskedModel, seed: int = 0) -> MaskedModel:
    """Tasks with masks, heads, and norms of their own that learned something."""
    generator = torch.Generator().manual_seed(seed)
    for task in (HALF, STARVED):
        model.add_head(task, 4 + task)
        for name, value in (*model.task_parts(task).named_parameters(), *model.task_parts(task).named_buffers()):
            if value.is_floating_point():
                low = 0.5 if name.endswith("running_var") else -0.3
                value.add_(low + 0.6 * torch.rand(value.shape, generator=generator))
        model.start_task(task, embedding(model, task, seed))
        model.finish_task()
    return model.eval()


def trained(name: str, seed: int = 0) -> MaskedModel:
    make, _, options = NETWORKS[name]
    torch.manual_seed(seed)
    return with_tasks(MaskedModel(make(), **options), seed=seed)


def batch(name: str, size: int) -> torch.Tensor:
    torch.manual_seed(size)
    return small_networks.inputs(trained(name), NETWORKS[name][1], size)


@torch.no_grad()
def over_all_units(model, task, x, mb_size):
    """Features with closed units computed and masked afterwards; and whether norms have statistics."""
    parts, masks = deepcopy(model.task_parts(task)), model.by_layer(model.binary_mask(task).double())
    model.eval()
    norms = running_norms(parts)
    if norms:
        retake(norms, x.split(mb_size), lambda part: model.backbone(part, parts, masks))
    return model.backbone(x, parts, masks), bool(norms)


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_features_equal_those_of_a_pass_over_all_units(name):
    model, x = trained(name).double(), batch(name, 12)
    x = x.double() if x.is_floating_point() else x
    for task in (HALF, STARVED):
        before = bits(model)
        expected, has_statistics = over_all_units(model, task, x, 6)
        found = CounterfactualFeatures(model, task, x, x.split(6))
        statistics, features = found(), found.features
        assert task != HALF or features.abs().max() > 1e-3  # few units may let nothing through
        assert torch.allclose(features, expected, atol=1e-8 * float(expected.abs().max().clamp_min(1)))
        assert bits(model) == before
        buffers = dict(model.task_parts(task).named_buffers())
        assert set(statistics) == (set(buffers) if has_statistics else set())
        for buffer, value in statistics.items():
            buffers[buffer].copy_(value)
        assert torch.equal(model.features(x, task), features)


@torch.no_grad()
@pytest.mark.parametrize("part", [slice(None), slice(1, None, 3)])
def test_a_first_layer_computes_only_units_that_changed(part, monkeypatch):
    model, x = trained("mlp").double(), batch("mlp", 12).double()
    weight, opened = next(model.backbone.parameters()), model.masks[HALF]["layers.0"].nonzero()[:, 0]
    features, before = CounterfactualFeatures(model, HALF, x, ()), weight.clone()
    computed = []

    def counted(x, weight, *bias):
        computed.append((len(x), len(weight)))
        return F.linear(x, weight, *bias)

    monkeypatch.setattr(head_fit, "F", SimpleNamespace(linear=counted))
    for state in (before, before + 0.1):
        weight.copy_(state)
        features(slice(1))
    for moved in ({0: 0.1}, {1: 0.1, 2: 0.3}, {0: 0.1, 1: 0.1}):
        weight.copy_(before)
        for unit, by in moved.items():
            weight[opened[unit]] += by
        features(part)
        assert torch.allclose(features.features[part], over_all_units(model, HALF, x[part], 6)[0], atol=1e-12)
    assert computed == [(12, 2 * len(opened) + 1), (len(x[part]), 1)]
