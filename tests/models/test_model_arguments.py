"""Modules, names and states that don't fit a model are refused and change nothing; a seed is any whole number."""

from functools import partial

import numpy as np
import pytest
import torch
from support import tiny
from support.small_networks import Net
from support.strategies import trained
from support.strategy_state import bits, unchanged
from torch import nn

from avalanche_amnesia.contrib.baselines import NetworkPerTask, SideNetworks
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel, TaskNormModel
from avalanche_amnesia.unit_graph import ModelError
from avalanche_amnesia.unit_graph.tracing import fix, validate

KINDS = [MaskedModel, SubnetModel, MultiHeadModel, TaskNormModel, NetworkPerTask, SideNetworks]
mlp = partial(MLP, 64, hidden=10, features=8)


@pytest.mark.parametrize(("outer", "inner"), [*zip(KINDS, KINDS[1:] + KINDS[:1], strict=True), (MaskedModel,) * 2])
def test_one_of_our_models_is_no_backbone(outer, inner):
    model = inner(mlp())
    before, modes = bits(model), [m.training for m in model.modules()]
    with pytest.raises(ModelError, match=rf"the backbone is a {inner.__name__}, .* give the feature extractor"):
        outer(model)
    nested = nn.Sequential(nn.Flatten(), model)
    nested.features = 8
    with pytest.raises(ModelError, match=rf"module '1' of Sequential is a {inner.__name__}"):
        outer(nested)
    assert (bits(model), [m.training for m in model.modules()]) == (before, modes)


def lazy():
    def forward(s, x):
        return torch.relu(s.out(torch.relu(s.norm(s.conv(x))).flatten(1)))

    return Net(forward, conv=nn.LazyConv2d(4, 3), norm=nn.LazyBatchNorm2d(), out=nn.LazyLinear(8), features=8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_must_be_a_module_and_lazy_ones_must_run_once_first(kind):
    for wrong in (None, MLP):
        with pytest.raises(TypeError, match=r"backbone must be an object of Module, got .*: a feature extractor, such"):
            kind(wrong)
    backbone = lazy()
    message = r"modules \['conv', 'norm', 'out'\] of Net are lazy: run the backbone on a batch before"
    with pytest.raises(ModelError, match=message):
        kind(backbone)
    with pytest.raises(ModelError, match="are lazy"):
        fix(backbone)
    assert "are lazy" in str(validate(backbone)[0])
    backbone(torch.rand(2, 1, 8, 8))
    options = {"input_shape": (1, 8, 8)} if kind is MaskedModel else {}
    model = kind(backbone, **options)
    model.add_head(0, 3)
    assert model(torch.rand(2, 1, 8, 8), 0).shape == (2, 3)


class Buffered(nn.Module):
    features = 8

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.register_buffer("shift", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return torch.relu(self.inner(x) * self.scale + self.inner.shift)


REFUSED = [
    ("inner.shift", "'inner.shift' is a buffer of Buffered, .*: name the module that holds it, 'inner'"),
    ("scale", "'scale' is a buffer of Buffered, .*: put it into a module and name that"),
    ("", "'': the backbone itself can't be declared, .* a module of its own .* SubnetModel"),
    ("Buffered", "'Buffered': the backbone itself can't be declared, .* SubnetModel"),
    ("outer", r"Buffered has no module or parameter 'outer'; it has \['inner', 'inner.bias', 'inner.weight'\]"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_only_a_module_or_a_parameter_can_be_declared(name, message):
    for option in ("frozen", "task_owned"):
        with pytest.raises(ValueError, match=message):
            MaskedModel(Buffered(), **{option: [name]})


@pytest.mark.parametrize("width", [0, 8.0, True])
def test_the_number_of_features_must_be_a_whole_number(width):
    backbone = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    with pytest.raises(ModelError, match="give n_features=, the width of what Sequential returns"):
        MultiHeadModel(backbone, width)
    assert MultiHeadModel(backbone, np.int64(8)).n_features == MultiHeadModel(backbone).n_features == 8


class Wider(tiny.Net):
    features = 7

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(8, 7)


of_one_task = partial(trained, 1, tiny.tasks(), tiny.strategy)


CHANGES = {
    "other heads": (
        lambda state: state | {"heads.0.weight": torch.zeros(2, 9)},
        r"heads.0.weight is \(2, 9\), here \(2, 6\)",
    ),
    "flat head": (lambda state: state | {"heads.0.weight": torch.zeros(2)}, r"heads.0.weight is \(2,\), here \(2, 6\)"),
    "no such task": (lambda state: state | {"heads.x.weight": torch.zeros(2, 6)}, "heads.x.weight|no share of task x"),
    "more": (lambda state: state | {"more": torch.zeros(2)}, r"it has besides \['more'\]"),
    "less": (lambda state: {n: v for n, v in state.items() if "first" not in n}, "it lacks .*first.weight|no share of"),
}


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("name", ["other network", *CHANGES])
def test_the_state_of_another_model_is_refused_and_changes_nothing(name, kind):
    strategy = of_one_task(kind=kind)
    if name == "other network":
        state, message = (
            of_one_task(kind=kind, net=Wider).model.state_dict(),
            r"second.weight is \(7, 8\), here \(6, 8\)|no share of this b",
        )
    else:
        change, message = CHANGES[name]
        state = change(dict(of_one_task(kind=kind, train_epochs=2).model.state_dict()))  # other values
    with unchanged(lambda: bits(strategy.model)), pytest.raises(ValueError, match=message):
        strategy.model.load_state_dict(state)
    assert strategy.model.tasks == (0,)
    strategy.train(tiny.tasks().train_stream[1])
    strategy.unlearn([0])
    assert strategy.model.tasks == (1,)


@pytest.mark.parametrize("given", [None, [], "model.pt", {"backbone.weight": 3}], ids=repr)
def test_an_object_that_is_no_state_is_refused(given):
    model = tiny.strategy().model
    message = r"takes a mapping of tensors.*torch.load\(path\).*load_state\(strategy, path\)"
    with unchanged(lambda: bits(model)), pytest.raises(TypeError, match=message):
        model.load_state_dict(given)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_may_be_any_whole_number(kind, seed):
    strategy, other = of_one_task(kind=kind, seed=seed), of_one_task(kind=kind, seed=seed + 2**65)
    assert bits(strategy.model) != bits(other.model)
    strategy.unlearn([0])
