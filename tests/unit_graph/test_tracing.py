"""Traces of backbones: once for all that are built alike, in both modes, and nothing of the backbone is changed."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from support.leaking_networks.kit import Net as NetOf
from support.leaking_networks.kit import part
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import tracing
from avalanche_amnesia.unit_graph.backbones import inputs_of
from avalanche_amnesia.unit_graph.exporting import export
from avalanche_amnesia.unit_graph.tracing import Known


class Net(nn.Module):
    def __init__(self, width=4, bias=True, slope=0.1, order=(2, 0, 1, 3), function=torch.tanh) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, width, bias=bias), nn.Linear(width, 3)
        self.slope, self.function = slope, function
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return self.c(self.function(self.a(x) * self.slope)[:, self.order])


@pytest.fixture
def exports(monkeypatch):
    """Modes that were exported: a list that grows."""
    monkeypatch.setattr(tracing, "_known", Known(2))
    modes, export = [], tracing.export
    monkeypatch.setattr(tracing, "export", lambda *args, **options: modes.append(options) or export(*args, **options))
    return modes


def test_what_is_built_alike_is_known(exports):
    first = MaskedModel(Net())
    assert len(exports) == 2  # training and evaluation
    torch.manual_seed(3)
    second = MaskedModel(Net())  # other weights
    assert len(exports) == 2
    x, mask = torch.randn(5, 6), torch.ones(second.n_units)
    with torch.no_grad():
        expected = second.backbone.c(torch.tanh(second.backbone.a(x) * 0.1)[:, second.backbone.order])
    assert torch.allclose(second.eval().masked_features(x, mask), expected, atol=1e-6)
    assert not torch.equal(first.eval().masked_features(x, mask), second.masked_features(x, mask))


@pytest.mark.parametrize(
    "other",
    [
        {"width": 5, "order": (2, 0, 1, 3, 4)},
        {"bias": False},
        {"slope": 0.2},
        {"order": (0, 1, 2, 3)},
        {"function": torch.sigmoid},
        {"function": functools.partial(torch.clamp, max=1.0)},
    ],
)
def test_what_differs_is_read_anew(exports, other):
    MaskedModel(Net())
    MaskedModel(Net(**other))
    assert len(exports) == 4


def test_functions_with_arguments_given_beforehand_are_compared(exports):
    for limit, n_exports in ((1.0, 2), (1.0, 2), (2.0, 4)):
        MaskedModel(Net(function=functools.partial(torch.clamp, max=limit)))
        assert len(exports) == n_exports
    MaskedModel(Net(function=functools.partial(torch.clip, max=2.0)))
    assert len(exports) == 6


def test_options_and_closures_count_too(exports):
    MaskedModel(Net(), frozen=["a"])
    MaskedModel(Net(), task_owned=["a"])
    assert len(exports) == 4
    number = 2.0
    MaskedModel(Net(function=lambda h: h * number))
    MaskedModel(Net(function=lambda h: h * number))
    assert len(exports) == 8  # what a closure holds can't be compared


def test_examples_are_compared(exports):
    x = torch.ones(3, 6)
    for example, n_exports in ((x, 2), (x.clone(), 2), (2 * x, 4), ((x,), 6)):
        MaskedModel(Net(), example=example)
        assert len(exports) == n_exports


def test_only_the_latest_are_kept(exports):
    for slope in (0.1, 0.2, 0.3, 0.1):
        MaskedModel(Net(slope=slope))
    assert len(exports) == 8


def apart(forward):
    """A network over 6 numbers: a layer, a norm, dropout, a last layer, and numbers that are no parameter."""
    makers = {"a": part(nn.Linear, 6, 8), "n": part(nn.BatchNorm1d, 8, affine=False), "d": part(nn.Dropout, 0.3)}
    net = NetOf(forward, **makers, c=part(nn.Linear, 8, 3))
    net.register_buffer("kept", torch.zeros(8))
    net.loose, net.seen = torch.ones(8), []
    return net


def written_over(h):
    h.view(-1, 2, 4)[:, 1].mul_(2)
    return h


def one_term_twice(s, x):
    """In evaluation mode dropout returns what it was given: both terms then are what is written."""
    h = s.a(x)
    return s.c(h + written_over(s.d(h)))


def attribute_that_is_set(s, x):
    """A pass that kept what the other one set would go another way."""
    h, s.path = s.a(x), "n" if hasattr(s, "path") else "d"
    return s.c(getattr(s, s.path)(h))


def mode_that_is_set(s, x):
    s.n.eval()
    return s.c(s.n(s.a(x)))


def child_by_its_mode(s, x):
    return s.c(s.n(s.a(x)) * (1 + s.n.__dict__["training"]))


class Child(nn.Module):
    training: bool = True

    def forward(self, x):
        return x if self.training else torch.tanh(x)


MODES = {
    "no mode at all": lambda s, x: s.c(torch.relu(s.a(x))),
    "norm and dropout": lambda s, x: s.c(s.d(torch.relu(s.n(s.a(x))))),
    "norm that runs twice": lambda s, x: s.c(s.n(torch.relu(s.n(s.a(x))))),
    "norm on the batch's numbers in both": lambda s, x: s.c(F.batch_norm(s.a(x), None, None, training=True)),
    "path by the mode": lambda s, x: s.c(s.a(x) if s.training else torch.relu(s.a(x))),
    "child by its mode": child_by_its_mode,
    "mode that is set": mode_that_is_set,
    "attribute that is set": attribute_that_is_set,
    "writes": lambda s, x: s.c(written_over(s.n(s.a(x)))),
    "writes behind dropout": one_term_twice,
    "input that is only reshaped": lambda s, x: s.c(s.a(x.flatten(1).contiguous())),
    "number of samples": lambda s, x: s.c(s.a(x).reshape(x.shape[0] * 2, 4).reshape(-1, 8) / x.shape[0]),
    "constants": lambda s, x: s.c(s.a(x)[:, torch.arange(7, -1, -1)] * torch.tensor([2.0]) + s.loose),
    "patched forward": None,
    "class with a mode of its own": None,
}


def made(name):
    net = apart(MODES[name] or MODES["norm and dropout"])
    if name == "patched forward":
        net.d.forward = lambda x: F.dropout(x.roll(1, 1), 0.5, net.n.training)
    elif name == "class with a mode of its own":
        net.d = Child()
    return net


@pytest.mark.parametrize("name", MODES)
@torch.no_grad()
def test_each_mode_computes_what_the_backbone_does(name):
    backbone, x = made(name), torch.randn(5, 6)
    model = MaskedModel(backbone, input_shape=(6,))
    for training in (True, False):
        torch.manual_seed(1)
        found = model.train(training).masked_features(x, torch.ones(model.n_units))
        torch.manual_seed(1)
        assert torch.allclose(found, backbone.train(training)(x), atol=1e-6), f"training={training}"


class Scaled(nn.Module):
    """Keeps its mode in its own way, as adapters that merge their weights do."""

    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(6, 8), 1.0

    def train(self, mode=True):
        super().train(mode)
        self.scale = 1.0 if mode else 2.0
        return self

    def forward(self, x):
        return self.a(x) * self.scale


@torch.no_grad()
def test_a_network_with_a_train_of_its_own_is_evaluated_as_it_is():
    backbone = Scaled()
    model, x = MaskedModel(backbone, input_shape=(6,)).eval(), torch.randn(5, 6)
    found = model.masked_features(x, torch.ones(model.n_units), model.fresh_parts())
    assert torch.allclose(found, backbone.eval()(x), atol=1e-6)


def test_modes_and_attributes_are_as_before():
    backbone = apart(attribute_that_is_set)
    backbone.n.eval()
    inputs = inputs_of(backbone, (6,))
    for training in (True, False):
        export(backbone, inputs, training=training, frozen=(), task_owned=())
    assert [module.training for module in backbone.modules()] == [True, True, False, True, True]
    assert not hasattr(backbone, "path")
    assert int(backbone.n.num_batches_tracked) == 0


def test_models_are_made_in_threads():
    made, begin = [], threading.Barrier(3)

    def make(width):
        begin.wait()
        made.append(MaskedModel(nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width)), input_shape=(6,)))

    threads = [threading.Thread(target=make, args=(width,)) for width in (31, 32, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3
