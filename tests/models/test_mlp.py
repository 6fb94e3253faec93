"""The MLP's options: the forward against a few lines of tensors, protection of its activations, refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from support.small_runs import assert_retained, make, permuted
from support.strategy_state import bits
from torch import nn
from torch.nn.functional import batch_norm, layer_norm

from avalanche_amnesia import MLP, AdaHAT, AdaHATRule, MaskedModel, SubnetModel


def leaky():
    return nn.LeakyReLU(0.2)


ACTIVATIONS = {
    "relu": (nn.ReLU, lambda x: x.clamp_min(0)),
    "tanh": (nn.Tanh, torch.tanh),
    "leaky": (leaky, lambda x: torch.where(x > 0, x, 0.2 * x)),
    "sigmoid": (nn.Sigmoid, lambda x: 1 / (1 + (-x).exp())),
    "gelu": (nn.GELU, lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2),
}
NORMS = {
    "none": lambda x: x,
    "batch": lambda x: batch_norm(x, None, None, training=True),
    "layer": lambda x: layer_norm(x, x.shape[1:]),
}
net = partial(MLP, 64, hidden=(24,), features=16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_the_forward_is_linear_norm_activation_for_each_layer(activation, bias, norm):
    made, formula = ACTIVATIONS[activation]
    mlp, x = MLP(12, hidden=(7, 6), features=5, activation=made, bias=bias, norm=norm), torch.randn(9, 3, 4)
    out = x.reshape(9, 12)
    weights = {name: p for name, p in mlp.named_parameters() if name.startswith("layers")}
    assert len(weights) == (6 if bias else 3)
    for index in range(3):
        out = out @ weights[f"layers.{index}.weight"].T + weights.get(f"layers.{index}.bias", 0)
        out = formula(NORMS[norm](out))
    assert torch.allclose(mlp.train()(x), out, atol=1e-5)


def test_the_default_draws_and_computes_the_same_as_linear_layers_and_relu():
    torch.manual_seed(3)
    mlp = net(dropout=0.3)
    torch.manual_seed(3)
    first, second = nn.Linear(64, 24), nn.Linear(24, 16)
    values = [first.weight, first.bias, second.weight, second.bias]
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), values, strict=True))
    assert list(mlp.state_dict()) == [f"layers.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    x, drop = torch.randn(8, 64), nn.Dropout(0.3)
    torch.manual_seed(4)
    ours = mlp(x)
    torch.manual_seed(4)
    assert torch.equal(ours, drop(torch.relu(second(drop(torch.relu(first(x)))))))


def test_the_weight_of_an_activation_is_frozen_after_the_first_task_or_refused():
    model = MaskedModel(net(activation=nn.PReLU))
    strategy = make(AdaHAT, model=model, optimizer="adam", adjustment=AdaHATRule(alpha=1e-30))
    assert_retained(strategy, permuted(3))
    assert float(model.backbone.get_parameter("activations.0.weight").detach()) != 0.25
    with pytest.raises(ValueError, match=r"activations.0.weight"):
        SubnetModel(net(activation=nn.PReLU), density=0.3)


def test_widths_and_dropouts_follow_the_arguments():
    mlp = MLP(12, hidden=(), features=5, dropout=(0.2, 0.5))
    assert (mlp.input_dropout.p, mlp.dropout.p, mlp.features) == (0.2, 0.5, 5)
    assert mlp(torch.rand(3, 1, 3, 4)).shape == (3, 5)
    assert bool((mlp(torch.randn(30, 12)) >= 0).all())
    shapes = [tuple(layer.weight.shape) for layer in MLP(12, hidden=(7, 6), features=5).layers]
    assert shapes == [(7, 12), (6, 7), (5, 6)]
    torch.manual_seed(0)
    one = MLP(64, hidden=100)
    torch.manual_seed(0)
    assert bits(one) == bits(MLP(64, hidden=(100,)))
    assert MLP(np.int64(64), hidden=np.int64(100), features=np.int32(8)).features == 8
    assert type(MLP(64, features=np.int64(8)).features) is int
