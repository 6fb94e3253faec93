"""The MLP's options, each against a few lines of tensors, and under masks: use, protection and exact unlearning."""

from functools import partial

import pytest
import torch
from support.parameter_use_oracle import random_mask, use_by_perturbation
from support.small_runs import assert_retained, make, permuted
from support.strategies import DIGITS, amnesiac, learn
from support.strategy_state import assert_nothing_stray, bits
from torch import nn
from torch.nn.functional import batch_norm, layer_norm

from avalanche_amnesia import HAT, MLP, WSN, AdaHAT, AdaHATRule, MaskedModel, SubnetModel

ACTIVATIONS = {
    "relu": (nn.ReLU, lambda x: x.clamp_min(0)),
    "tanh": (nn.Tanh, torch.tanh),
    "leaky": (lambda: nn.LeakyReLU(0.2), lambda x: torch.where(x > 0, x, 0.2 * x)),
    "sigmoid": (nn.Sigmoid, lambda x: 1 / (1 + (-x).exp())),
    "gelu": (nn.GELU, lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2),
}
NORMS = {
    "none": lambda x: x,
    "batch": lambda x: batch_norm(x, None, None, training=True),
    "layer": lambda x: layer_norm(x, x.shape[1:]),
}


def leaky():
    return nn.LeakyReLU(0.2)


OPTIONS = [
    {"activation": nn.Tanh},
    {"activation": nn.Sigmoid, "bias": False},
    {"bias": False},
    {"norm": "batch"},
    {"norm": "layer", "bias": False, "activation": nn.GELU},
    {"norm": "batch", "bias": False, "activation": leaky},
]


net = partial(MLP, 64, hidden=(24,), features=16)


def in_words(options):
    return ", ".join(f"{name} {getattr(value, '__name__', value)}" for name, value in options.items())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_forward_is_linear_norm_activation_layer_by_layer(activation, bias, norm):
    made, formula = ACTIVATIONS[activation]
    torch.manual_seed(0)
    mlp, x = MLP(12, hidden=(7, 6), features=5, activation=made, bias=bias, norm=norm), torch.randn(9, 3, 4)
    out = x.reshape(9, 12)
    weights = {name: p for name, p in mlp.named_parameters() if name.startswith("layers")}
    assert len(weights) == (6 if bias else 3)
    for index in range(3):
        out = out @ weights[f"layers.{index}.weight"].T + weights.get(f"layers.{index}.bias", 0)
        out = formula(NORMS[norm](out))
    assert torch.allclose(mlp.train()(x), out, atol=1e-5)


def test_by_default_it_draws_and_computes_what_plain_linear_and_relu_do():
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
def test_use_of_every_entry_is_what_moving_it_shows(activation, bias, norm):
    torch.manual_seed(1)
    model = MaskedModel(
        MLP(6, hidden=(7,), features=5, activation=ACTIVATIONS[activation][0], bias=bias, norm=norm)
    ).eval()
    mask, x = random_mask(model, 3), torch.randn(16, 6)
    use = model.graph.parameter_use(model.by_layer(mask))
    for name, reaches in use_by_perturbation(model, mask, x).items():
        found = (use[name] > 0).expand_as(reaches)
        assert bool((found | (reaches == 0)).all()), f"{name}: an entry that counts as free moves the features"
        assert not bool(found.all()), name
        if norm == "none":
            assert torch.equal(found, reaches > 0), name


@pytest.mark.parametrize("options", OPTIONS, ids=in_words)
@pytest.mark.parametrize("optimizer", ["adam decay", "momentum"])
def test_earlier_tasks_keep_their_bits(options, optimizer):
    assert_retained(make(HAT, model=MaskedModel(net(**options)), optimizer=optimizer), permuted(3))


@pytest.mark.parametrize("options", OPTIONS, ids=in_words)
def test_masks_over_weights_keep_their_bits_too(options):
    assert_retained(make(WSN, model=SubnetModel(net(**options), density=0.3), optimizer="adam decay"), permuted(3))


@pytest.mark.parametrize("options", OPTIONS, ids=in_words)
def test_what_is_called_exact_equals_the_retrained_model(options):
    def learned(tasks):
        strategy = amnesiac(net=lambda: net(**options), train_mb_size=32)
        return learn(strategy, [DIGITS.train_stream[t] for t in tasks])

    strategy = learned(range(3))
    assert strategy.unlearn([2]).claim == "exact"
    assert bits(strategy.model) == bits(learned([t for t in range(3) if t != 2]).model)


@pytest.mark.parametrize("options", OPTIONS, ids=in_words)
def test_a_task_in_the_middle_leaves_nothing_that_nobody_owns(options):
    strategy = amnesiac(net=lambda: net(**options), adjustment="adahat", train_epochs=1, train_mb_size=32)
    assert_nothing_stray(strategy, DIGITS.train_stream, [[1], [0, 3], [2]])


def test_a_weight_of_an_activation_is_frozen_by_the_first_task_or_refused():
    model = MaskedModel(net(activation=nn.PReLU))
    strategy = make(AdaHAT, model=model, optimizer="adam", adjustment=AdaHATRule(alpha=1e-30))
    assert_retained(strategy, permuted(3))
    assert float(model.backbone.get_parameter("activations.0.weight").detach()) != 0.25
    with pytest.raises(ValueError, match=r"activations.0.weight"):
        SubnetModel(net(activation=nn.PReLU), density=0.3)


@pytest.mark.parametrize("activation", ["relu", nn.ReLU(), torch.relu, lambda: torch.relu, None])
def test_what_makes_no_activation_is_refused(activation):
    with pytest.raises(TypeError):
        net(activation=activation)


def test_a_norm_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="norm must be one of 'none', 'batch', 'layer', got 'group'"):
        net(norm="group")
