"""Traces of backbones, which equal networks share, and rules for their operations: of the user, and wrong ones."""

import copy
import functools
import threading

import pytest
import torch
from support.leaking_networks.kit import part
from support.small_networks import Net, parts
from torch import nn

from avalanche_amnesia import MaskedModel, ModelError, rule
from avalanche_amnesia.unit_graph import tracing
from avalanche_amnesia.unit_graph.tracing import Cache
from avalanche_amnesia.unit_graph.walk import RULES


class Scaling(nn.Module):
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
    monkeypatch.setattr(tracing, "_known", Cache(2))
    modes, export = [], tracing.export
    monkeypatch.setattr(tracing, "export", lambda *args, **options: modes.append(options) or export(*args, **options))
    return modes


def test_equal_networks_share_a_trace(exports):
    first = MaskedModel(Scaling())
    assert len(exports) == 2  # training and evaluation
    torch.manual_seed(3)
    second = MaskedModel(Scaling())  # other weights
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
        MaskedModel(Scaling(**network), **options)
        assert len(exports) == n_exports


SCALE = {"scale": 1.0}


class ReadsGlobal(Scaling):
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
def test_each_mode_computes_what_a_backbone_that_sets_an_attribute_does_and_changes_nothing_in_it():
    backbone, x = with_modes(attribute_that_is_set), torch.randn(5, 6)
    model = MaskedModel(backbone, input_shape=(6,))
    assert not hasattr(backbone, "path")
    assert int(backbone.n.num_batches_tracked) == 0
    for training in (True, False):
        torch.manual_seed(1)
        found = model.train(training).masked_features(x, torch.ones(model.n_units))
        torch.manual_seed(1)
        assert torch.allclose(found, copy.deepcopy(backbone).train(training)(x), atol=1e-6), f"training={training}"


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


def two_layers(function):
    return Net(lambda s, x: s.c(function(s.a(x))), a=nn.Linear(6, 4), c=nn.Linear(4, 3))


@torch.library.custom_op("unit_graph_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
OPERATION = torch.ops.unit_graph_tests.halved


def test_an_operation_without_a_rule_counts_as_always_used():
    def sources():
        return MaskedModel(two_layers(OPERATION), input_shape=(6,)).describe().rows[1][3]

    assert sources() == ("input",)
    try:
        rule(OPERATION)(lambda walk, node, x: x)
        assert sources() == ("a",)
    finally:
        RULES.pop(OPERATION, None)


@pytest.fixture
def no_known_traces(monkeypatch):
    """Trace every backbone again, because a rule has changed."""
    monkeypatch.setattr(tracing, "_known", Cache(32))


class Summed(nn.Module):
    """Has a forward of its own, whose line the message shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.a(x)).cumsum(1))


@pytest.mark.usefixtures("no_known_traces")
def test_a_rule_that_raises_is_reported_with_its_operation(monkeypatch):
    def broken(walk, node, x):
        raise IndexError("nothing there")

    monkeypatch.setitem(RULES, torch.ops.aten.tanh, broken)
    with pytest.raises(ModelError, match=r"'tanh' .*can't take these arguments \(nothing there\)"):
        MaskedModel(Summed())


@pytest.mark.usefixtures("no_known_traces")
def test_the_trial_catches_a_wrong_rule(monkeypatch):
    assert MaskedModel(Summed()).describe().tried
    assert "tried out in both modes" in " ".join(str(MaskedModel(Summed()).describe()).split())
    monkeypatch.setattr(tracing, "_known", Cache(32))
    monkeypatch.setitem(RULES, torch.ops.aten.cumsum, lambda walk, node, x, dim, **options: x)
    with pytest.raises(ModelError, match=r"mode a task reads .* outside of its mask"):
        MaskedModel(Summed())
    assert "not tried out (trial=False)" in " ".join(str(MaskedModel(Summed(), trial=False).describe()).split())


def test_a_forward_that_differs_between_calls_is_refused():
    calls = [0]

    def counted(h):
        calls[0] += 1
        return h + calls[0]

    with pytest.raises(ModelError, match="something else than its forward"):
        MaskedModel(two_layers(counted))


# Number types and gradients -------------------------------------------------------------------------------------------


def test_gradients_stop_where_the_forward_stops_them():
    def forward(s, x):
        with torch.no_grad():
            fixed = s.a(x)
        return s.c(torch.tanh(fixed) + torch.tanh(s.b(x)).detach() + s.d(x))

    model = MaskedModel(Net(forward, a=nn.Linear(6, 4), b=nn.Linear(6, 4), d=nn.Linear(6, 4), c=nn.Linear(4, 3)))
    model.train().masked_features(torch.randn(5, 6), torch.ones(model.n_units)).sum().backward()
    given = {name for name, parameter in model.backbone.named_parameters() if parameter.grad is not None}
    assert given == {"d.weight", "d.bias", "c.weight", "c.bias"}
