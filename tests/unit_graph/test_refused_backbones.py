"""Backbones that can't be masked safely are refused, with a message that names them, the reason, and a way out."""

import pytest
import torch
import torch.nn.functional as F
from support.small_networks import Net
from torch import nn

from avalanche_amnesia import MLP, MaskedModel, ModelError, validate


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x, y):
        return self.a(x) + y


GENERATOR = torch.Generator()


def linears(forward, **parts) -> nn.Module:
    return Net(forward, a=nn.Linear(6, 4), b=nn.Linear(4, 4), **parts)


def convs(forward, kind=nn.Conv2d) -> nn.Module:
    return Net(forward, a=kind(1, 4, 1), b=kind(4, 4, 1))


REFUSED = {
    "lstm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 4)), "returns a tuple with 3 tensors"),
    "unused layer": (
        lambda: linears(lambda self, x: self.a(x)),
        r"b\.weight.*b\.bias.*no mask would protect.*fix\(model\)",
    ),
    "control flow": (
        lambda: linears(lambda self, x: self.b(self.a(x)) if x.sum() > 0 else self.a(x)),
        "Net can't be exported.*control flow.*frozen=",
    ),
    "control flow inside": (
        lambda: nn.Sequential(nn.Linear(6, 4), linears(lambda self, x: self.b(x) if x.sum() > 0 else x)),
        r"Net '1' of Sequential can't be exported.*control flow.*frozen=\['1'\]",
    ),
    "two inputs": (TwoInputs, r"no input was found|2 inputs"),
    "map output": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3)), r"returns values of shape.*flatten or average"),
    "pooled map output": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2)),
        r"shape \(batch, 2, 2, 2\).*flatten",
    ),
    "samples compared": (
        lambda: linears(lambda self, x: self.b(self.a(x)) @ self.a(x).T),
        "features depends on the size of the batch",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(32, 4)),
        "Embedding '0' of Sequential has sparse=True.*sparse=False",
        {"input_shape": (8,)},
    ),
    "bits of values as another type": (
        lambda: linears(lambda self, x: self.b(self.a(x).view(torch.int32).view(torch.float32))),
        r"'view'.*view\(torch.int32\) reads the bits of numbers as another type; convert them",
    ),
    "bits of a weight as another type": (
        lambda: linears(lambda self, x: F.linear(self.a(x), self.b.weight.view(torch.int32).view(torch.float32))),
        r"view\(torch.int32\) reads the bits of numbers as another type",
    ),
    "noise": (
        lambda: linears(lambda self, x: self.b(self.a(x) * torch.rand(4))),
        "'rand'.*draws random numbers in evaluation mode too.*nn.Dropout",
    ),
    "noise of the shape of values": (
        lambda: linears(lambda self, x: self.b(self.a(x) + torch.randn_like(self.a(x)))),
        "'randn_like'.*draws random numbers in evaluation mode too",
    ),
    "noise written in place": (
        lambda: linears(lambda self, x: self.b(self.a(x) * x.new_empty((x.shape[0], 1)).bernoulli_(0.5))),
        "'bernoulli'.*draws random numbers in evaluation mode too",
    ),
    "noise of a generator": (
        lambda: linears(lambda self, x: self.b(self.a(x) * torch.rand(4, generator=GENERATOR))),
        r"draws from a torch\.Generator of its own.*leave generator= out",
    ),
    "several outputs": (
        lambda: linears(lambda self, x: (self.a(x), self.b(self.a(x)))),
        "returns a tuple with 2 tensors",
    ),
    "unknown width": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), "depends on the size.*input_shape="),
    "nothing to mask": (
        lambda: nn.Sequential(nn.Flatten(), nn.ReLU()),
        "no weighted layer to mask; use a Linear",
        {"input_shape": (6,)},
    ),
    "widths that differ": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(5, 4)),
        r"no input was found.*\[2, 4\] X \[5, 4\]",
    ),
    "linear on a map": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 4)), "returns values of shape"),
    "mean over samples": (lambda: linears(lambda self, x: self.b(self.a(x)) - self.a(x).mean(0)), "samples of a batch"),
    "concatenation of samples": (
        lambda: linears(lambda self, x: self.b(torch.cat([self.a(x), self.a(x)], 0))),
        "another first dimension",
    ),
    "transpose": (
        lambda: linears(lambda self, x: self.b(self.a(x)).t()),
        "another first dimension|depends on the size",
    ),
    "samples and units folded": (
        lambda: Net(
            lambda self, x: self.b(torch.sigmoid(self.a(x)).view(-1, 2)).view(-1, 4),
            a=nn.Linear(6, 4),
            b=nn.Linear(2, 2),
        ),
        "units and samples lie on one axis.*axis of their own",
    ),
    "learned tensor of no module": (
        lambda: linears(lambda self, x: self.b(self.a(x)) * (self.list[0] * 2), list=[nn.Parameter(torch.ones(4))]),
        "learns and is no parameter",
    ),
    # Reductions that leave no features, poles where masks make zeros.
    "mean over one of two position axes": (lambda: convs(lambda self, x: self.b(self.a(x)).mean(2)), "of shape"),
    "broadcast map output": (
        lambda: convs(lambda self, x: F.adaptive_avg_pool2d(self.a(x), 1) + self.b(self.a(x))),
        "returns values of shape",
    ),
    "division by units": (
        lambda: linears(lambda self, x: 1 / self.b(self.a(x))),
        "'reciprocal'.*infinite; add a small",
    ),
    "root of units": (
        lambda: linears(lambda self, x: self.b(self.a(x).relu().sqrt())),
        "'sqrt'.*infinite; add a small",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_message_that_names_it_and_left_as_it_was(name):
    make, message, *options = REFUSED[name]
    torch.manual_seed(0)
    backbone = make().train()
    next(backbone.modules()).eval()  # modes need not all be the same
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    modes = [module.training for module in backbone.modules()]
    with pytest.raises(ModelError, match=message):
        MaskedModel(backbone, **dict(*options))
    assert modes == [module.training for module in backbone.modules()]
    assert all(torch.equal(value, state[key]) for key, value in backbone.state_dict().items())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in backbone.modules())
    findings = validate(backbone, **dict(*options))
    assert findings
    assert all(finding.where and finding.reason and finding.fix for finding in findings)


def test_a_wrong_input_shape_is_refused_and_the_mode_kept():
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(ModelError, match=r"input of shape \(6,\)"):
        MaskedModel(backbone, input_shape=(6,))
    assert backbone.training
    assert MaskedModel(backbone, input_shape=(1, 5, 5)).n_features == 18
    assert backbone.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": ["7"]}, "no module or parameter '7'; it has"),
        ({"task_owned": ["0.weights"]}, "no module or parameter '0.weights'"),
        ({"classifier": "fc"}, "no module or parameter 'fc'"),
        ({"norm": "shared"}, "norm must be one of 'task', 'batch', got 'shared'"),
    ],
)
def test_names_that_are_not_known_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MaskedModel(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 0}, "must be an int of at least 1, got"),
        ({"hidden": (4, 0)}, "must be an int of at least 1, got"),
        ({"features": -1}, "must be an int of at least 1, got"),
        ({"hidden": (4.5,)}, "must be an int of at least 1, got"),
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


def test_a_part_of_a_norm_can_not_be_frozen_but_the_whole_of_it():
    backbone = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU())
    with pytest.raises(ModelError, match="a norm can't be frozen in part"):
        MaskedModel(backbone, frozen=["1.weight"])
    assert MaskedModel(backbone, frozen=["1"]).graph.frozen == {"1.weight", "1.bias"}
