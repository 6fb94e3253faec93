"""Every network family learns and unlearns tasks exactly, and every layer learns its mask."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from avalanche.models import MTSimpleMLP
from support.small_networks import Net
from support.small_runs import logits_of, retained
from support.strategies import DIGITS, Hears, feed_in
from support.strategy_state import initial_values, same_state
from torch import nn
from torchvision import models as zoo
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock
from torchvision.models.shufflenetv2 import InvertedResidual

from avalanche_amnesia import AmnesiacHAT, MaskedModel, task_benchmark


def resnet() -> nn.Module:
    """The ResNet for CIFAR, with a largest entry taken after its 3×3 stem."""
    shortcut = nn.Sequential(nn.Conv2d(8, 12, 1, 2, bias=False), nn.BatchNorm2d(12))
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(BasicBlock(8, 8), BasicBlock(8, 12, 2, shortcut), nn.AvgPool2d(4), nn.Flatten()),
    )


def normed() -> nn.Module:
    """Convolutions with the norms of groups and of single samples."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 12, 3)),
        *(nn.InstanceNorm2d(12, affine=True, track_running_stats=True), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


class UpAndDown(nn.Module):
    """A small U-Net: convolution, transposed convolution, and the input concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 2, stride=2)
        self.middle, self.up = nn.Conv2d(6, 8, 3, padding=1), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out, self.last = nn.Conv2d(7, 4, 3, padding=1), nn.Linear(4 * 64, 12)

    def forward(self, x):
        h = F.relu(self.middle(F.relu(self.down(x))))
        h = torch.cat([F.relu(self.up(h)), x], 1)
        return self.last(F.relu(self.out(h)).flatten(1))


class TextTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.position = nn.Parameter(torch.randn(1, 64, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(self.embedding(x) + self.position).mean(1)


def shuffled() -> nn.Module:
    """Both kinds of blocks of ShuffleNet: channels split or not, and shuffled."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def swin() -> nn.Module:
    return zoo.SwinTransformer([2, 2], 8, [2, 1], [2, 2], [2, 2], stochastic_depth_prob=0.1)


def conv1d() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(8, 12, 3), nn.BatchNorm1d(12), nn.GELU(), nn.Conv1d(12, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, 12)),
    )


def conv3d() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv3d(1, 6, (1, 3, 3), stride=2), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 8, (2, 3, 3))),
        *(nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
    )


SMALL, LARGE = (3, 16, 16), (3, 32, 32)
ATTENTION = ["features.1.0.attn", "features.3.0.attn"]
# name → (factory, shape of one input, options of MaskedModel)
FAMILIES = {
    "resnet cifar": (resnet, SMALL, {}),
    "shufflenet": (shuffled, SMALL, {}),
    "densenet": (lambda: zoo.DenseNet(4, (2, 1), 8, bn_size=2), LARGE, {"classifier": "classifier"}),
    "convnext": (
        lambda: ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], stochastic_depth_prob=0.1),
        LARGE,
        {"classifier": "classifier.2"},
    ),
    "vit": (lambda: zoo.VisionTransformer(16, 4, 1, 2, 16, 32), SMALL, {"classifier": "heads"}),
    "swin": (swin, SMALL, {"classifier": "head", "task_owned": ATTENTION}),
    "multi-task mlp": (lambda: MTSimpleMLP(64, 12), (1, 8, 8), {}),
    "conv1d": (conv1d, (8, 8), {}),
    "conv3d": (conv3d, (1, 3, 16, 16), {}),
    "transposed": (UpAndDown, (1, 8, 8), {}),
    "other norms": (normed, SMALL, {}),
    "text transformer": (TextTransformer, (64,), {}),
}


def stream(name):
    """Three tasks of two classes, with samples drawn around a mean of each class."""
    shape, generator = FAMILIES[name][1], torch.Generator().manual_seed(0)
    y = torch.arange(120) % 6
    if name == "text transformer":
        x = (y[:, None] * 2 + torch.randint(6, (120, *shape), generator=generator)) % 17
    else:
        x = torch.randn(6, *shape, generator=generator)[y] + torch.randn(120, *shape, generator=generator)
    return task_benchmark((x, y), (x, y), [[0, 1], [2, 3], [4, 5]])


# Lives --------------------------------------------------------------------------------------------------------------


def gate_gradients(largest):
    """A plugin that notes the largest gradient that the loss sends to the gate of each layer, over a training."""

    def note(strategy):
        for name, part in strategy.model.by_layer(strategy.model.gate.gradient().abs()).items():
            largest[name] = max(largest.get(name, 0.0), float(part.max()))

    return Hears(after_backward=note)


def build(name, seed=0, dtype=torch.float32):
    make, shape, options = FAMILIES[name]
    torch.manual_seed(seed)
    return MaskedModel(make().to(dtype), input_shape=shape, **options)


def strategy_of(model, **options):
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    options = {"train_mb_size": 16, "train_epochs": 2, "seed": 1, **options}
    return AmnesiacHAT(model=model, optimizer=adam, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_tasks_are_learned_kept_and_unlearned(name):
    model, benchmark = build(name), stream(name)
    shares = model.describe().shares
    assert sum(shares.values()) == pytest.approx(1)
    assert {n for n, _ in model.backbone.named_parameters()} == set(model.graph.factors) | model.graph.owned
    initial, largest = initial_values(model), {}
    strategy = strategy_of(model, plugins=[gate_gradients(largest)])
    for kept in retained(strategy, benchmark):
        if len(kept) == 1:
            assert [layer for layer, size in largest.items() if size == 0] == []
            assert largest.keys() == model.graph.layers.keys()
    fresh = build(name, seed=5)
    fresh.load_state_dict(model.state_dict())
    for twin in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_state(logits_of(twin, benchmark, range(3)), kept)
    strategy.unlearn([2])
    assert model.tasks == (0, 1)
    assert same_state(logits_of(model, benchmark, range(2)), {task: kept[task] for task in (0, 1)})
    strategy.unlearn([0, 1])
    assert model.tasks == ()
    assert dict(model.masks) == {}
    assert same_state(initial_values(model), initial)
    assert [n for n in model.state_dict() if not n.startswith("backbone.")] == []


@pytest.mark.parametrize(("name", "dtype"), [("resnet cifar", torch.bfloat16), ("conv1d", torch.float64)])
def test_backbones_of_other_precision_are_unlearned_exactly(name, dtype):
    model = build(name, dtype=dtype)
    benchmark = stream(name)
    initial, strategy = initial_values(model), strategy_of(model, train_epochs=1, plugins=[feed_in()])
    for kept in retained(strategy, benchmark):
        assert {logits.dtype for logits in kept.values()} == {dtype}
    strategy.unlearn([0, 1, 2])
    assert {value.dtype for value in initial_values(model).values()} == {dtype}
    assert same_state(initial_values(model), initial)


def test_a_layer_multiplied_by_zero_gets_no_gradient():
    """The control of the check of gate gradients above."""

    def cut(net, x):
        x = x.flatten(1)
        return torch.cat([torch.relu(net.a(x)) * 0.0, torch.relu(net.b(x))], 1)

    torch.manual_seed(0)
    model = MaskedModel(Net(cut, a=nn.Linear(64, 12), b=nn.Linear(64, 8)), input_shape=(1, 8, 8))
    strategy_of(model, plugins=[gate_gradients(largest := {})]).train(DIGITS.train_stream[0])
    assert largest["a"] == 0 < largest["b"]
