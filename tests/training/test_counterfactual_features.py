"""Features of a task without other tasks equal those of a pass over all units, statistics included."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as tv
from support.strategy_state import bits
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import head_fit
from avalanche_amnesia.training.head_fit import CounterfactualFeatures
from avalanche_amnesia.training.norm_statistics import retake, running_norms


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.Sigmoid()),
    )


def small_convnext():
    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 1)], layer_scale=1.0)


def small_vit():
    return tv.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=10)


class Gated(nn.Module):
    """Branches, a depthwise convolution, concatenation, residual addition, a layer scale and a gate."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.near, self.far = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1, groups=4)
        self.by_unit = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        paths = torch.cat([self.near(x), self.far(x)], dim=1)
        x = x + self.scale * self.by_unit(paths)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[..., None, None]
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class MixedNorms(nn.Module):
    """Norms that mix units: groups that lose unlike numbers of channels, positions and channels together."""

    def __init__(self):
        super().__init__()
        self.a, self.group = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12)
        self.b, self.instance = nn.Conv2d(12, 6, 3), nn.InstanceNorm2d(6, affine=True)
        self.whole, self.c = nn.LayerNorm((6, 4, 4)), nn.Linear(96, 8)
        self.layer, self.rms, self.d = nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = F.gelu(self.group(self.a(x)))
        x = self.whole(F.elu(self.instance(self.b(x))))
        x = self.layer(self.c(x.flatten(1)))
        return self.d(self.rms(x) + torch.tanh(x))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.out = nn.Embedding(11, 6), nn.ConvTranspose1d(6, 5, 2, stride=2), nn.Conv1d(5, 4, 3)

    def forward(self, x):
        return F.softplus(self.out(torch.sigmoid(self.up(self.embed(x).transpose(1, 2))))).amax(-1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.recurrent, self.out = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.recurrent(torch.relu(self.inner(x)))[0][:, -1])


NETWORKS = {  # name → function that makes it, shape of one input, keyword arguments of MaskedModel
    "mlp": (lambda: MLP(20, hidden=(16, 12), features=8), (20,), {}),
    "lenet": (lenet, (1, 28, 28), {"input_shape": (1, 28, 28)}),
    "convnext": (small_convnext, (3, 64, 64), {"classifier": "classifier.2", "input_shape": (3, 64, 64)}),
    "vit": (small_vit, (3, 16, 16), {"classifier": "heads.head", "input_shape": (3, 16, 16)}),
    "gated": (Gated, (3, 9, 9), {}),  # traced on other images than it is run on
    "gated on the batch's statistics": (Gated, (3, 9, 9), {"input_shape": (3, 9, 9), "norm": "batch"}),
    "mixed norms": (MixedNorms, (3, 8, 8), {"input_shape": (3, 8, 8)}),
    "tokens": (Tokens, (7,), {}),
    "frozen": (Recurrent, (5, 4), {"input_shape": (5, 4), "frozen": ["recurrent"]}),
    "task-owned": (Recurrent, (5, 4), {"input_shape": (5, 4), "task_owned": ["recurrent"]}),
}
HALF, SPARSE, STARVED = 0, 1, 2


def embedding(model: MaskedModel, task: int, seed: int = 0) -> torch.Tensor:
    """Opens half of the units; a twentieth; half, but in each third layer one alone, and in a middle one none."""
    values = torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed + task))
    values -= 0.95 if task == SPARSE else 0.5
    if task == STARVED:
        layers = list(model.by_layer(values).values())
        for layer in layers[::3]:
            layer.fill_(-1.0)[-1] = 1.0
        layers[len(layers) // 2].fill_(-1.0)
    return values


@torch.no_grad()
def with_tasks(model: MaskedModel, tasks=(HALF, SPARSE, STARVED), seed: int = 0) -> MaskedModel:
    """Tasks with masks, heads, and norms of their own that learned something."""
    generator = torch.Generator().manual_seed(seed)
    for task in tasks:
        model.add_head(task, 4 + task)
        for name, value in (*model.own[str(task)].named_parameters(), *model.own[str(task)].named_buffers()):
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
    generator = torch.Generator().manual_seed(size)
    if name == "tokens":
        return torch.randint(0, 11, (size, *NETWORKS[name][1]), generator=generator)
    return torch.randn(size, *NETWORKS[name][1], generator=generator)


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
    model, x = trained(name, seed=int(name == "tokens")).double(), batch(name, 12)
    x = x.double() if x.is_floating_point() else x
    for task in (HALF, SPARSE):
        before = bits(model)
        expected, has_statistics = over_all_units(model, task, x, 6)
        found = CounterfactualFeatures(model, task, x, x.split(6))
        statistics, features = found(), found.features
        assert task != HALF or features.abs().max() > 1e-3  # a twentieth of the units may let nothing through
        assert torch.allclose(features, expected, atol=1e-8 * float(expected.abs().max().clamp_min(1)))
        assert bits(model) == before
        buffers = dict(model.task_parts(task).named_buffers())
        assert set(statistics) == (set(buffers) if has_statistics else set())
        for buffer, value in statistics.items():
            buffers[buffer].copy_(value)
        assert torch.equal(model.features(x, task), features)


@pytest.mark.parametrize(("name", "limit", "size"), [("lenet", 0.0, 32), ("lenet", 1e10, 512), ("mlp", 0.0, 2048)])
def test_a_large_network_takes_fewer_images_at_a_time(monkeypatch, name, limit, size):
    monkeypatch.setattr(head_fit, "LARGE", limit)
    assert CounterfactualFeatures(trained(name), HALF, batch(name, 12), ())._batch == size


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


def test_large_results_of_a_first_layer_are_not_kept(monkeypatch):
    monkeypatch.setattr(head_fit, "MOST_KEPT", 100)
    model, x = trained("mlp"), batch("mlp", 12)
    features = CounterfactualFeatures(model, HALF, x, ())
    for _ in range(3):
        features()
    assert not any(features._first_layers._kept.values())
    assert torch.equal(features.features, model.features(x, HALF))
