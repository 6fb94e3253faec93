"""Rules for operations: rules of the user, wrong rules that the trial catches, entries mixed in computed weights."""

import pytest
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from support.small_networks import Net
from torch import nn

from avalanche_amnesia import MaskedModel, ModelError, rule
from avalanche_amnesia.unit_graph import tracing
from avalanche_amnesia.unit_graph.tracing import Known
from avalanche_amnesia.unit_graph.values import Dependence, _components
from avalanche_amnesia.unit_graph.walk import RULES


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
    monkeypatch.setattr(tracing, "_known", Known(32))


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
def test_the_trial_catches_a_wrong_rule_and_names_its_operation(monkeypatch):
    assert MaskedModel(Summed()).describe().tried
    assert "tried out in both modes" in " ".join(str(MaskedModel(Summed()).describe()).split())
    monkeypatch.setattr(tracing, "_known", Known(32))
    monkeypatch.setitem(RULES, torch.ops.aten.cumsum, lambda walk, node, x, dim, **options: x)
    with pytest.raises(ModelError, match=r"features of one task moved.*first in operation 'cumsum'.*cumsum\(1\)"):
        MaskedModel(Summed())
    untried = MaskedModel(Summed(), trial=False)
    assert "not tried out (trial=False)" in " ".join(str(untried.describe()).split())


def test_a_forward_that_differs_between_calls_is_refused():
    calls = [0]

    def counted(h):
        calls[0] += 1
        return h + calls[0]

    with pytest.raises(ModelError, match="something else than its forward"):
        MaskedModel(two_layers(counted))


# Entries that computed weights mix ------------------------------------------------------------------------------------


def test_entries_that_a_sum_mixes_depend_on_their_whole_group():
    size = torch.Size((2, 3))
    whole = Dependence("w", size, torch.arange(6).reshape(size))
    rows = whole.mixed(torch.tensor([[0], [1]]))
    assert rows.place.shape == (2,)
    group = rows.group.reshape(size)
    assert all(bool((group[i] == rows.place[i]).all()) for i in range(2))
    assert rows.place[0] != rows.place[1]
    # an entry in both groups joins them
    twice = Dependence("w", size, torch.tensor([0, 1, 1, 2])).mixed(torch.tensor([0, 0, 1, 1]))
    assert twice.place[0] == twice.place[1]


def test_connected_components_equal_scipy_s():
    generator = torch.Generator().manual_seed(0)
    for n, edges in ((10, 5), (50, 40), (1000, 700), (1000, 1500)):
        for _ in range(10):
            first, second = torch.randint(n, (2, edges), generator=generator)
            links = coo_matrix((torch.ones(edges), (first, second)), shape=(n, n))
            expected = torch.from_numpy(connected_components(links, directed=False)[1]).long()
            assert torch.equal(_components(n, first, second), expected)


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
