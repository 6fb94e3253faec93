"""Modules declared frozen or task-owned stay whole, whatever they take and return."""

import pytest
import torch
from torch import nn

from avalanche_amnesia import MaskedModel, ModelError


class Sized(nn.Module):
    """Takes a number of samples beside the tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, n):
        return self.layer(x).reshape(n, -1)


class Source(nn.Module):
    """Takes nothing."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self):
        return torch.tanh(self.bias)


class Branching(nn.Module):
    """Decides on values, and returns a mapping."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return {"large": y if float(y.sum()) > 0 else -y, "small": (y.mean(1),)}


class Inner(nn.Module):
    """Calls one declared module inside of another."""

    def __init__(self, branching):
        super().__init__()
        self.branching = branching

    def forward(self, x):
        return self.branching(x)["large"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.sized, self.source, self.branching = Sized(), Source(), Branching()
        self.inner = Inner(self.branching)

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = self.sized(h, x.shape[0]) + self.source()
        parts = self.branching(h)
        h = parts["large"] * parts["small"][0].unsqueeze(1) + self.inner(h)
        return self.last(torch.relu(h))


DECLARED = ["sized", "source", "branching", "inner"]


@pytest.mark.parametrize("option", ["frozen", "task_owned"])
def test_modules_with_sizes_without_tensors_and_inside_of_each_other(option):
    net = Net().eval()
    model = MaskedModel(net, input_shape=(6,), **{option: DECLARED})
    model.add_head(0, 2)
    x = torch.randn(7, 6)
    expected = model.heads["0"](net(x))  # another number of samples than the network was read with
    model.eval()
    assert torch.allclose(model(x, 0), expected, atol=1e-6)


class OldNorm(nn.Module):
    """The weight of torch.nn.utils.weight_norm is a tensor that a hook computes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_that_computes_its_weight_is_frozen_or_refused_by_name():
    assert MaskedModel(OldNorm(), input_shape=(6,), frozen=["first"]).describe().tried
    with pytest.raises(ModelError, match=r"task_owned module 'first' can't be copied"):
        MaskedModel(OldNorm(), input_shape=(6,), task_owned=["first"])


class Counts(nn.Module):
    """Keeps a count in training mode, and drops out: running it must leave nothing behind."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.drop(self.layer(x))


def test_looking_at_a_declared_module_leaves_nothing_behind():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Counts(), nn.Linear(8, 5))
    before, draws = net.state_dict()["2.calls"].clone(), torch.get_rng_state()
    MaskedModel(net, input_shape=(6,), task_owned=["2"])
    assert torch.equal(net[2].calls, before)
    assert torch.equal(torch.get_rng_state(), draws)


GLOBAL = {"scale": 1.0}


class ReadsGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) * GLOBAL["scale"])


def test_a_trace_that_is_known_is_compared_with_the_network_again(monkeypatch):
    MaskedModel(ReadsGlobal(), input_shape=(6,))
    monkeypatch.setitem(GLOBAL, "scale", 3.0)
    with pytest.raises(ModelError, match="computes something else than its forward"):
        MaskedModel(ReadsGlobal(), input_shape=(6,))


class Permutes(nn.Module):
    """Moves entries by a buffer of real numbers."""

    def __init__(self, order):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 5)
        self.register_buffer("order", torch.tensor(order, dtype=torch.float32))

    def forward(self, x):
        return self.last(torch.relu(self.first(x))[:, self.order.long()])


def test_networks_that_differ_in_a_buffer_are_read_apart():
    models = [MaskedModel(Permutes(order), input_shape=(6,)) for order in ([0, 1, 2, 3], [3, 2, 1, 0])]
    reads = [model.graph.factors["last.weight"][1].reshape(-1).tolist() for model in models]
    assert reads[0] == reads[1][::-1]
    assert reads[0] != reads[1]
