"""Both modes of a backbone from one export: each is what its own export returns, or each is exported by itself."""

import threading

import pytest
import torch
import torch.nn.functional as F
from support.export_networks import NETWORKS
from support.leaking_networks import Net, part
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import ModelError, tracing
from avalanche_amnesia.unit_graph.exporting import export, export_both, module_of
from avalanche_amnesia.unit_graph.inputs import inputs_of
from avalanche_amnesia.unit_graph.tracing import without


def apart(forward):
    """A network over 6 numbers: a layer, a norm, dropout, a last layer, and numbers that are no parameter."""
    makers = {"a": part(nn.Linear, 6, 8), "n": part(nn.BatchNorm1d, 8), "d": part(nn.Dropout, 0.3)}
    net = Net(forward, **makers, c=part(nn.Linear, 8, 3))
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


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.m = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, 0.2, batch_first=True)

    def forward(self, x):
        h = self.a(x)
        return self.m(h, h, h, need_weights=False)[0].mean(1)


TOGETHER = {
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
BY_THEMSELVES = {
    "input written over": lambda s, x: s.c(s.a(x.add_(1))),
    "input written over last": lambda s, x: (s.c(s.a(x)), x.zero_())[0],
    "buffer written over": lambda s, x: s.c(s.a(x) + s.kept.add_(1)),
    "tensor of nobody written over": lambda s, x: s.c(s.a(x) + s.loose.add_(1)),
    "what the other mode computed": lambda s, x: (s.seen.append(s.a(x)), s.c(s.seen[0]))[1],
    "control flow on values": lambda s, x: s.c(s.a(x) if x.sum() > 0 else x.new_zeros(len(x), 8)),
}


def made(name):
    net = apart(TOGETHER[name] or TOGETHER["norm and dropout"])
    if name == "patched forward":
        net.d.forward = lambda x: F.dropout(x.roll(1, 1), 0.5, net.n.training)
    elif name == "class with a mode of its own":
        net.d = Child()
    return net


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


def told(exported):
    """What a graph computes, whatever the order and the names of its nodes."""
    known = {}
    for node in exported.graph.nodes:
        content = exported.constants.get(node.target) if node.op == "get_attr" else None
        called = node.target if node.op != "placeholder" else node.name
        where = module_of(node) if node.op == "call_function" else ""
        used = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: _Known(known[used]))
        constant = None if content is None else content.tolist()
        known[node] = hash((node.op, str(called) if constant is None else "", where, repr(used), repr(constant)))
    output = next(node for node in exported.graph.nodes if node.op == "output")
    inputs = [node.name for node in exported.graph.nodes if node.op == "placeholder"]
    return known[output], inputs, exported.shapes, exported.guards, exported.written, len(exported.batch)


class _Known(int):
    """Number of a node in the place of the node."""


def assert_as_by_themselves(backbone, shape, classifier=None):
    inputs = inputs_of(backbone, shape)
    with without(backbone, classifier):
        both = export_both(backbone, inputs)
    assert both is not None
    for training, exported in both.items():
        with without(backbone, classifier):
            alone = export(backbone, inputs, training=training, frozen=(), task_owned=())
        assert told(exported) == told(alone), f"training={training}"
        names = [[n.name for n in e.graph.nodes if "batch_norm" in n.name] for e in (exported, alone)]
        assert names[0] == names[1]


@pytest.mark.parametrize("name", TOGETHER)
def test_each_mode_is_what_its_own_export_returns(name):
    assert_as_by_themselves(made(name), (6,))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_in_both_modes(dropout):
    backbone = Attended()
    backbone.m.dropout = dropout
    assert_as_by_themselves(backbone, (5, 4))


@pytest.mark.parametrize(
    "name", ["lenet", "vgg", "resnet18", "SlimResNet18", "densenet", "vit", "mixed norms", "tokens"]
)
def test_published_networks_in_both_modes(name):
    make, _, options = NETWORKS[name]
    assert_as_by_themselves(make(), options.get("input_shape"), options.get("classifier"))


@pytest.mark.parametrize("name", [*BY_THEMSELVES, "train() of its own"])
def test_what_does_more_than_compute_is_exported_by_itself(name):
    backbone = Scaled() if name not in BY_THEMSELVES else apart(BY_THEMSELVES[name])
    assert export_both(backbone, inputs_of(backbone, (6,))) is None


def test_a_network_with_a_declared_module_is_exported_mode_by_mode():
    backbone = apart(TOGETHER["norm and dropout"])
    inputs = inputs_of(backbone, (6,))
    assert export_both(backbone, inputs, ["a"]) is None
    assert export_both(backbone, inputs, ["a.weight"]) is not None


@torch.no_grad()
def test_a_network_with_a_train_of_its_own_is_evaluated_as_it_is():
    torch.manual_seed(0)
    backbone = Scaled()
    model, x = MaskedModel(backbone, input_shape=(6,)).eval(), torch.randn(5, 6)
    found = model.masked_features(x, torch.ones(model.n_units), model.fresh_parts())
    assert torch.allclose(found, backbone.eval()(x), atol=1e-6)


def test_a_network_is_exported_once(monkeypatch):
    alone = []
    monkeypatch.setattr(tracing, "export", lambda *args, **options: alone.append(options) or export(*args, **options))
    torch.manual_seed(0)
    MaskedModel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.21)), input_shape=(6,))
    assert alone == []
    with pytest.raises(ModelError, match="control flow"):
        MaskedModel(apart(BY_THEMSELVES["control flow on values"]), input_shape=(6,))
    assert [options["training"] for options in alone] == [True]


def test_modes_and_attributes_are_as_before():
    backbone = apart(attribute_that_is_set)
    backbone.n.eval()
    export_both(backbone, inputs_of(backbone, (6,)))
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
