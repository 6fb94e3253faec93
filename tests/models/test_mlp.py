"""The MLP's options: the forward against a few lines of tensors, protection under masks, exact unlearning, refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from support.parameter_use_oracle import random_mask, use_by_perturbation
from support.small_runs import assert_retained, make, permuted
from support.strategies import DIGITS, amnesiac, learn
from support.strategy_state import assert_nothing_stray, bits
from torch import nn
from torch.nn.functional import batch_norm, layer_norm

from avalanche_amnesia import HAT, MLP, WSN, AdaHAT, AdaHATRule, MaskedModel, SubnetModel


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
OPTIONS = {
    "sigmoid, no bias": {"activation": nn.Sigmoid, "bias": False},
    "batch norm": {"norm": "batch"},
    "layer norm, no bias, gelu": {"norm": "layer", "bias": False, "activation": nn.GELU},
    "batch norm, no bias, leaky": {"norm": "batch", "bias": False, "activation": leaky},
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_used_entries_are_the_entries_whose_change_shows(activation, bias, norm):
    torch.manual_seed(1)
    options = {"activation": ACTIVATIONS[activation][0], "bias": bias, "norm": norm}
    model = MaskedModel(MLP(6, hidden=(7,), features=5, **options)).eval()
    mask, x = random_mask(model, 3), torch.randn(16, 6)
    use = model.graph.parameter_use(model.by_layer(mask))
    for name, reaches in use_by_perturbation(model, mask, x).items():
        found = (use[name] > 0).expand_as(reaches)
        assert bool((found | (reaches == 0)).all()), f"{name}: an unused entry changes the features"
        assert not bool(found.all()), name
        if norm == "none":
            assert torch.equal(found, reaches > 0), name


@with_options
@pytest.mark.parametrize("kind", [HAT, WSN])
def test_earlier_tasks_keep_their_bits(options, kind):
    model = MaskedModel(net(**options)) if kind is HAT else SubnetModel(net(**options), density=0.3)
    assert_retained(make(kind, model=model, optimizer="adam decay"), permuted(3))


@with_options
def test_an_exact_unlearning_equals_the_retrained_model(options):
    def learned(tasks):
        strategy = amnesiac(net=lambda: net(**options), train_mb_size=32)
        return learn(strategy, [DIGITS.train_stream[t] for t in tasks])

    strategy = learned(range(3))
    assert strategy.unlearn([2]).claim == "exact"
    assert bits(strategy.model) == bits(learned([0, 1]).model)


@with_options
def test_unlearning_leaves_no_entry_without_an_owner(options):
    strategy = amnesiac(net=lambda: net(**options), adjustment="adahat", train_epochs=1, train_mb_size=32)
    assert_nothing_stray(strategy, DIGITS.train_stream, [[1], [0, 3], [2]])


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


WIDTH = "must be an int of at least 1, got"
REFUSED = [
    ({"in_features": 0}, ValueError, WIDTH),
    ({"hidden": 0}, ValueError, f"a width in hidden {WIDTH} 0"),
    ({"hidden": None}, ValueError, f"a width in hidden {WIDTH} None"),
    ({"hidden": (10, 5.0)}, ValueError, f"a width in hidden {WIDTH} 5.0"),
    ({"features": True}, ValueError, f"features {WIDTH} True"),
    ({"dropout": 1.0}, ValueError, "dropout"),
    ({"dropout": (0.2, -0.1)}, ValueError, "dropout"),
    ({"norm": "group"}, ValueError, "norm must be one of 'none', 'batch', 'layer', got 'group'"),
    ({"activation": "relu"}, TypeError, ""),
    ({"activation": nn.ReLU()}, TypeError, ""),
    ({"activation": torch.relu}, TypeError, ""),
    ({"activation": lambda: torch.relu}, TypeError, ""),
    ({"activation": None}, TypeError, ""),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_a_wrong_option_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        MLP(**{"in_features": 64, **options})
