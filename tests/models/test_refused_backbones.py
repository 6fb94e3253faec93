"""What can't be masked safely is refused, with a message that names it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel, ModelError


class Forward(nn.Module):
    """Two linear layers (and whatever else is given) around a forward of the test's choice."""

    def __init__(self, forward, **parts) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)
        self.given = (forward,)

    def forward(self, x):
        return self.given[0](self, x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x, y):
        return self.a(x)


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    return net


class Conv(nn.Module):
    """Two convolutions, and a reduction of the test's choice in between or behind."""

    def __init__(self, forward, kind=nn.Conv2d) -> None:
        super().__init__()
        self.a, self.b = kind(1, 4, 1), kind(4, 4, 1)
        self.given = (forward,)

    def forward(self, x):
        return self.given[0](self, x)


REFUSED = {
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten()), "'1'.*BatchNorm2d"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), "'1'.*LayerNorm"),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)), "'1'.*GroupNorm"),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU()), "'1'.*PReLU"),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(1)), "'1'.*Softmax"),
    "lstm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 4)), "'1'.*LSTM"),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten()), "ConvTranspose2d"),
    "raw parameter": (
        lambda: Forward(lambda self, x: self.b(self.a(x) + self.p), p=nn.Parameter(torch.ones(4))),
        "parameter or buffer used directly",
    ),
    "functional linear": (lambda: Forward(lambda self, x: F.linear(x, self.a.weight)), "used directly"),
    "unused layer": (lambda: Forward(lambda self, x: self.a(x)), r"b\.bias.*b\.weight"),
    "tied weights": (tied, "one parameter under two names"),
    "control flow": (
        lambda: Forward(lambda self, x: self.b(self.a(x)) if x.sum() > 0 else self.a(x)),
        "Forward can't be traced",
    ),
    "two inputs": (TwoInputs, r"2 inputs.*'x', 'y'"),
    "map output": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3)), "returns a map"),
    "pooled map output": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2)), "returns a map"),
    "product of branches": (
        lambda: Forward(lambda self, x: self.a(x) * torch.sigmoid(self.b(self.a(x)))),
        "'mul' has no masking rule",
    ),
    "matrix product": (lambda: Forward(lambda self, x: self.b(self.a(x)) @ self.a(x).T), "no masking rule"),
    "several outputs": (lambda: Forward(lambda self, x: (self.a(x), self.b(self.a(x)))), "returns tuple"),
    "unknown width": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), r"input_shape="),
    "nothing to mask": (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), "no Linear or Conv"),
    "widths that differ": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(5, 4)), "'1'.*4 entries where 5"),
    "linear on a map": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 4)), "mixes positions"),
    "convolution on units": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Conv1d(4, 4, 1)), "convolution on flattened"),
    "mean over units": (lambda: Forward(lambda self, x: self.b(self.a(x)).mean(1)), "mixes units"),
    "concatenation of samples": (
        lambda: Forward(lambda self, x: self.b(torch.cat([self.a(x), self.a(x)], 0))),
        "concatenation along axis 0",
    ),
    "slice of units": (lambda: Forward(lambda self, x: self.b(self.a(x))[:, :2]), "'getitem'"),
    "transpose": (lambda: Forward(lambda self, x: self.b(self.a(x)).t()), "'t'"),
    "softmax of units": (lambda: Forward(lambda self, x: F.softmax(self.b(self.a(x)), 1)), "'softmax'"),
    # In place, the value that is used later changes behind its mask.
    "sigmoid in place": (
        lambda: Forward(lambda self, x: (h := self.a(x), h.sigmoid_(), self.b(h))[2]),
        "sigmoid_.*in place",
    ),
    "branch added in place": (
        lambda: Forward(lambda self, x: (h := self.a(x), h.add_(self.b(h)), h)[2]),
        "add_.*in place",
    ),
    "hard sigmoid in place": (
        lambda: Forward(lambda self, x: (h := self.a(x), self.b(self.s(h)) + h)[1], s=nn.Hardsigmoid(inplace=True)),
        "'s'.*in place",
    ),
    # Reductions and pools that see other axes than the positions.
    "mean over one of two position axes": (lambda: Conv(lambda self, x: self.b(self.a(x)).mean(2)), "mean"),
    "mean over channels of a sequence": (
        lambda: Conv(lambda self, x: self.b(self.a(x)).mean((-2, -1)), nn.Conv1d),
        "mean",
    ),
    "broadcast map output": (
        lambda: Conv(lambda self, x: F.adaptive_avg_pool2d(self.a(x), 1) + self.b(self.a(x))),
        "returns a map",
    ),
    "map beside features": (
        lambda: Forward(lambda self, x: torch.cat([self.c(x), self.a(x)], 1), c=nn.Conv1d(6, 4, 1)),
        "positions beside one without",
    ),
    "division by units": (lambda: Forward(lambda self, x: 1 / self.b(self.a(x))), "'truediv'"),
    "pool over units": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.MaxPool1d(3, stride=1, padding=1), nn.Linear(4, 4)),
        "MaxPool1d",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_message_that_names_it(name):
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        MaskedModel(make())


def test_a_wrong_input_shape_is_refused_and_the_mode_kept():
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(ModelError, match=r"input of shape \(6,\)"):
        MaskedModel(backbone, input_shape=(6,))
    assert backbone.training
    assert MaskedModel(backbone, input_shape=(1, 5, 5)).n_features == 18
    assert backbone.training


def test_a_refused_backbone_is_left_as_it_was():
    backbone = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.LayerNorm(4))
    x = torch.randn(3, 6)
    expected = backbone(x)
    with pytest.raises(ModelError):
        MaskedModel(backbone)
    assert torch.equal(backbone(x), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 0}, "widths"),
        ({"hidden": (4, 0)}, "widths"),
        ({"features": -1}, "widths"),
        ({"hidden": (4.5,)}, "widths"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": (0.2, -0.1)}, "dropout"),
    ],
)
def test_mlp_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        MLP(**{"in_features": 6, **options})


def test_mlp_shapes_and_dropout():
    net = MLP(12, hidden=(), features=5, dropout=(0.2, 0.5))
    assert (net.input_dropout.p, net.dropout.p, net.features) == (0.2, 0.5, 5)
    assert net(torch.rand(3, 1, 3, 4)).shape == (3, 5)
    assert bool((net(torch.randn(30, 12)) >= 0).all())
    assert [tuple(layer.weight.shape) for layer in MLP(12, hidden=(7, 6), features=5).layers] == [
        (7, 12),
        (6, 7),
        (5, 6),
    ]
