"""Evaluation mode of a backbone that is read once: the graph that torch.export would have returned, or none."""

import random
import re
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.export_networks import NETWORKS
from support.leaking_networks import Net, part
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import tracing
from avalanche_amnesia.unit_graph.exporting import export
from avalanche_amnesia.unit_graph.inputs import inputs_of
from avalanche_amnesia.unit_graph.tracing import without


def over(norm, *more):
    """A network over 6 numbers with a module behind its first layer."""
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), *more, nn.Linear(8, 3))


def images(norm):
    return nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def apart(forward):
    makers = {"a": part(nn.Linear, 6, 8), "n": part(nn.BatchNorm1d, 8), "d": part(nn.Dropout, 0.3)}
    return Net(forward, **makers, c=part(nn.Linear, 8, 3))


def written_over(h):
    h.view(-1, 2, 4)[:, 1].mul_(2)
    return h


def two_readers(s, x):
    """In evaluation mode dropout returns what it was given: both terms then are what is written."""
    h = s.a(x)
    return s.c(h + written_over(s.d(h)))


def switched_off():
    norm = nn.BatchNorm1d(8)
    norm.track_running_stats = False  # in training mode it is not given the statistics that it holds
    return over(norm)


def hooked():
    norm = nn.BatchNorm1d(8)
    norm.register_forward_hook(lambda module, given, result: result + F.dropout(result, 0.5, training=True))
    return over(norm)


def patched():
    norm = nn.Dropout(0.5)
    norm.forward = lambda x: F.dropout(x.roll(1, 1), 0.5, norm.training)
    return over(norm)


class Attended(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.a, self.m = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, dropout, batch_first=True)

    def forward(self, x):
        h = self.a(x)
        return self.m(h, h, h, need_weights=False)[0].mean(1)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + F.batch_norm(x, None, None, training=True)


def sets_a_mode(s, x):
    s.n.eval()
    return s.c(s.n(s.a(x)))


# name → (network, shape of one input)
FOLLOW = {
    "no mode at all": (lambda: over(nn.LayerNorm(8)), (6,)),
    "norm and dropout": (lambda: over(nn.BatchNorm1d(8), nn.Dropout(0.3)), (6,)),
    "dropout of everything, and of nothing": (lambda: over(nn.Dropout(1.0), nn.Dropout(0.0)), (6,)),
    "dropout in place": (lambda: over(nn.Dropout(0.3, inplace=True)), (6,)),
    "writes that torch makes functional": (lambda: apart(lambda s, x: s.c(written_over(s.n(s.a(x))))), (6,)),
    "plain average": (lambda: over(nn.BatchNorm1d(8, momentum=None)), (6,)),
    "norm without statistics": (lambda: over(nn.BatchNorm1d(8, track_running_stats=False)), (6,)),
    "norm without parameters": (lambda: images(nn.BatchNorm2d(8, affine=False)), (1, 8, 8)),
    "instance norm": (lambda: images(nn.InstanceNorm2d(8, affine=True)), (1, 8, 8)),
    "instance norm with statistics": (lambda: images(nn.InstanceNorm2d(8, track_running_stats=True)), (1, 8, 8)),
    "attention": (lambda: Attended(0.0), (5, 4)),
    "norm that runs twice": (lambda: apart(lambda s, x: s.c(s.n(torch.relu(s.n(s.a(x)))))), (6,)),
    "functions with flags of their own": (lambda: apart(lambda s, x: s.c(F.dropout(s.a(x), 0.5, False))), (6,)),
}
READ_TWICE = {
    "path by the mode": lambda s, x: s.c(s.a(x) if s.training else torch.relu(s.a(x))),
    "mode of a module inside": lambda s, x: s.c(s.a(x) * (1 + s.a.training)),
    "mode by its name": lambda s, x: s.c(s.a(x) * (1 + getattr(s, "train" + "ing"))),
    "mode that is set": sets_a_mode,
    "dropout by the mode": lambda s, x: s.c(F.dropout(s.a(x), 0.5, s.training)),
    "dropout in both modes": lambda s, x: s.c(F.dropout(s.a(x), 0.5, True)),
    "drawn path": lambda s, x: s.c(torch.relu(s.a(x)) if random.random() < 2 else s.a(x)),
    "path drawn by numpy": lambda s, x: s.c(torch.relu(s.a(x)) if np.random.rand() < 2 else s.a(x)),  # noqa: NPY002
    "writes behind dropout": two_readers,
    "norm without its call": lambda s, x: s.c(s.n.forward(s.a(x))),
}
OTHERS = {
    "statistics switched off": switched_off,
    "hook": hooked,
    "patched forward": patched,
    "class of one's own": lambda: over(OwnNorm(8)),
    "another dropout": lambda: over(nn.AlphaDropout(0.3)),
    "random slopes": lambda: over(nn.RReLU()),
}


def read(backbone, shape, training=True, classifier=None):
    with without(backbone, classifier):
        return export(backbone, inputs_of(backbone, shape), training=training, frozen=(), task_owned=())


def told(exported):
    """All that is known of a graph, with its nodes by number: their names count what was traced between them."""
    numbers = {node.name: f"%{number}" for number, node in enumerate(exported.graph.nodes)}
    steps = [re.sub(r"%(\w+)", lambda found: numbers[found[1]], node.format_node()) for node in exported.graph.nodes]
    return steps, exported.shapes, exported.guards, exported.written, sorted(exported.constants)


def assert_both_modes(backbone, shape, classifier=None):
    learning = read(backbone, shape, True, classifier)
    before = told(learning)
    assert learning.evaluation is not None
    assert told(learning.evaluation) == told(read(backbone, shape, False, classifier))
    assert told(learning) == before


@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("name", FOLLOW)
def test_evaluation_mode_follows_from_training_mode(name, any_size):
    make, shape = FOLLOW[name]
    assert_both_modes(make(), None if any_size and len(shape) == 3 else shape)


@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        "vgg",
        "resnet18",
        "SlimResNet18",
        "SimpleCNN",
        "mobilenet",
        "densenet",
        "vit",
        "gated",
        "mixed norms",
        "tokens",
    ],
)
def test_it_does_in_published_networks(name):
    make, _, options = NETWORKS[name]
    assert_both_modes(make(), options.get("input_shape"), options.get("classifier"))


@pytest.mark.parametrize("name", [*READ_TWICE, *OTHERS])
def test_both_modes_are_read_where_they_may_part(name):
    backbone = apart(READ_TWICE[name]) if name in READ_TWICE else OTHERS[name]()
    assert read(backbone, (6,)).evaluation is None


def test_a_network_is_exported_once(monkeypatch):
    modes = []
    monkeypatch.setattr(
        tracing, "export", lambda *args, **options: modes.append(options["training"]) or export(*args, **options)
    )
    torch.manual_seed(0)
    MaskedModel(over(nn.BatchNorm1d(8), nn.Dropout(0.21)), input_shape=(6,))
    assert modes == [True]
    MaskedModel(over(nn.BatchNorm1d(8), nn.AlphaDropout(0.21)), input_shape=(6,))
    assert modes == [True, True, False]


def test_nothing_is_left_in_torch():
    def broken(s, x):
        raise ArithmeticError

    for forward in (lambda s, x: s.c(s.n(s.a(x))), broken):
        backbone = apart(forward)
        try:
            read(backbone, (6,))
        except Exception:
            assert forward is broken
        assert "training" not in vars(nn.Module)
        assert all(vars(module)["training"] is True for module in backbone.modules())


def test_models_are_made_in_threads():
    made, begin = [], threading.Barrier(3)

    def make(width):
        begin.wait()
        made.append(MaskedModel(over(nn.BatchNorm1d(8), nn.Linear(8, width), nn.Linear(width, 8)), input_shape=(6,)))

    threads = [threading.Thread(target=make, args=(width,)) for width in (31, 32, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3
