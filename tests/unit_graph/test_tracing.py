"""Traces of backbones: equal networks share a trace, both modes are traced, and the backbone is not changed."""

import copy
import functools
import threading

import pytest
import torch
from support.leaking_networks.kit import part
from support.small_networks import parts
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import ModelError, tracing
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
    """Return a list to which every export adds its options."""
    monkeypatch.setattr(tracing, "_known", Known(2))
    modes, export = [], tracing.export
    monkeypatch.setattr(tracing, "export", lambda *args, **options: modes.append(options) or export(*args, **options))
    return modes


def test_equal_networks_share_a_trace(exports):
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


def limited(function, limit):
    return {"function": functools.partial(function, max=limit)}


def scaled(number):
    return {"function": lambda h: h * number}


X = torch.ones(3, 6)
OTHERS = {"bias": False, "slope": 0.2, "order": (0, 1, 2, 3), "function": functools.partial(torch.clamp, max=1.0)}
# name → models as (options of the network, options of MaskedModel), number of exports after each of them
SERIES = {
    **{f"another {name}": ([({}, {}), ({name: value}, {})], [2, 4]) for name, value in OTHERS.items()},
    "functions with arguments": (
        [(limited(torch.clamp, 1.0), {}), (limited(torch.clamp, 1.0), {}), (limited(torch.clamp, 2.0), {})],
        [2, 2, 4],
    ),
    "declared modules": ([({}, {"frozen": ["a"]}), ({}, {"task_owned": ["a"]})], [2, 4]),
    "closures, which can't be compared": ([(scaled(2.0), {}), (scaled(2.0), {})], [2, 4]),
    "examples": ([({}, {"example": x}) for x in (X, X.clone(), 2 * X, (X,))], [2, 2, 4, 6]),
    "a limited memory": ([({"slope": slope}, {}) for slope in (0.1, 0.2, 0.3, 0.1)], [2, 4, 6, 8]),
}


@pytest.mark.parametrize("name", SERIES)
def test_a_trace_is_shared_only_by_equal_networks_and_options(exports, name):
    for (network, options), n_exports in zip(*SERIES[name], strict=True):
        MaskedModel(Net(**network), **options)
        assert len(exports) == n_exports


SCALE = {"scale": 1.0}


class ReadsGlobal(Net):
    def forward(self, x):
        return super().forward(x) * SCALE["scale"]


def test_a_known_trace_is_still_compared_with_the_network(monkeypatch):
    MaskedModel(ReadsGlobal(), input_shape=(6,))
    monkeypatch.setitem(SCALE, "scale", 3.0)
    with pytest.raises(ModelError, match="computes something else than its forward"):
        MaskedModel(ReadsGlobal(), input_shape=(6,))


def with_modes(forward):
    """A network over 6 numbers: a layer, a norm, dropout, a last layer, a buffer and a plain tensor."""
    makers = {"a": part(nn.Linear, 6, 8), "n": part(nn.BatchNorm1d, 8, affine=False), "d": part(nn.Dropout, 0.3)}
    net = parts(forward, **makers, c=part(nn.Linear, 8, 3))()
    net.register_buffer("kept", torch.zeros(8))
    net.loose, net.seen = torch.ones(8), []
    return net


def attribute_that_is_set(s, x):
    """A second pass that sees the attribute of the first one takes another path."""
    h, s.path = s.a(x), "n" if hasattr(s, "path") else "d"
    return s.c(getattr(s, s.path)(h))


@torch.no_grad()
def test_each_mode_computes_what_a_backbone_that_sets_an_attribute_does():
    backbone, x = with_modes(attribute_that_is_set), torch.randn(5, 6)
    model = MaskedModel(backbone, input_shape=(6,))
    for training in (True, False):
        torch.manual_seed(1)
        found = model.train(training).masked_features(x, torch.ones(model.n_units))
        torch.manual_seed(1)
        expected = copy.deepcopy(backbone).train(training)(x)
        assert torch.allclose(found, expected, atol=1e-6), f"training={training}"


class Scaled(nn.Module):
    """Has its own ``train`` method, as adapters that merge their weights have."""

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
def test_a_network_with_its_own_train_method_is_evaluated_by_it():
    backbone = Scaled()
    model, x = MaskedModel(backbone, input_shape=(6,)).eval(), torch.randn(5, 6)
    found = model.masked_features(x, torch.ones(model.n_units), model.fresh_parts())
    assert torch.allclose(found, backbone.eval()(x), atol=1e-6)


def test_a_trace_changes_no_mode_and_no_attribute():
    backbone = with_modes(attribute_that_is_set)
    backbone.n.eval()
    inputs = inputs_of(backbone, (6,))
    for training in (True, False):
        export(backbone, inputs, training=training, frozen=(), task_owned=())
    assert [module.training for module in backbone.modules()] == [True, True, False, True, True]
    assert not hasattr(backbone, "path")
    assert int(backbone.n.num_batches_tracked) == 0


def test_threads_can_make_models_at_the_same_time():
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
