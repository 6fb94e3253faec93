"""Rules: one of one's own, weights that are computed from others, names of layers, types of numbers."""

import copy

import pytest
import torch
from support.small_networks import Net
from support.soundness_oracle import assert_masked_right, assert_sound, some_mask
from torch import nn

from avalanche_amnesia import MaskedModel, ModelError, rule
from avalanche_amnesia.unit_graph.values import Dependence
from avalanche_amnesia.unit_graph.walk import RULES


def weights(*shape):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


# A rule of one's own ---------------------------------------------------------------------------------------------


@torch.library.custom_op("unit_graph_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
OPERATION = torch.ops.unit_graph_tests.halved


def with_halved():
    return MaskedModel(
        Net(lambda s, x: s.c(torch.ops.unit_graph_tests.halved(s.a(x))), a=nn.Linear(6, 4), c=nn.Linear(4, 3)),
        input_shape=(6,),
    )


def test_an_operation_without_a_rule_counts_as_always_in_use_until_it_has_one(monkeypatch):
    assert with_halved().describe().rows[1][3] == ("input",)
    monkeypatch.setattr("avalanche_amnesia.unit_graph.walk.RULES", RULES)
    try:
        rule(OPERATION)(lambda walk, node, x: x)
        assert with_halved().describe().rows[1][3] == ("a",)
    finally:
        RULES.pop(OPERATION, None)


def test_a_rule_that_fails_is_a_finding_with_its_line(monkeypatch):
    def broken(walk, node, x):
        raise IndexError("nothing there")

    monkeypatch.setitem(RULES, torch.ops.aten.tanh, broken)
    with pytest.raises(ModelError, match=r"'tanh' .*can't take these arguments \(nothing there\)"):
        MaskedModel(Net(lambda s, x: s.c(torch.tanh(s.a(x + 0)) * 1.5), a=nn.Linear(6, 4), c=nn.Linear(4, 3)))


# Weights that are computed ---------------------------------------------------------------------------------------


def test_entries_that_meet_in_a_sum_depend_on_all_of_its_group():
    size = torch.Size((2, 3))
    whole = Dependence("w", size, torch.arange(6).reshape(size))
    rows = whole.mixed(torch.tensor([[0], [1]]))
    assert rows.place.shape == (2,)
    group = rows.group.reshape(size)
    assert all(bool((group[i] == rows.place[i]).all()) for i in range(2))
    assert rows.place[0] != rows.place[1]
    # an entry that goes into both makes one group of them
    twice = Dependence("w", size, torch.tensor([0, 1, 1, 2])).mixed(torch.tensor([0, 0, 1, 1]))
    assert twice.place[0] == twice.place[1]


def lora(s, x):
    return s.c(torch.tanh(nn.functional.linear(x, s.a.weight + s.up @ s.down, s.a.bias)))


COMPUTED = {
    "low-rank update": lambda: Net(lora, a=nn.Linear(6, 4), up=weights(4, 2), down=weights(2, 6), c=nn.Linear(4, 3)),
    "standardised": lambda: Net(
        lambda s, x: s.c(
            torch.tanh(nn.functional.linear(x, (s.w - s.w.mean(1, keepdim=True)) / (s.w.std(1, keepdim=True) + 1)))
        ),
        w=weights(4, 6),
        c=nn.Linear(4, 3),
    ),
    "softmax of weights": lambda: Net(lambda s, x: s.c(x @ s.w.softmax(0)), w=weights(6, 4), c=nn.Linear(4, 3)),
    "an unknown function of weights": lambda: Net(
        lambda s, x: s.c(x @ torch.linalg.qr(s.w)[0]), w=weights(6, 4), c=nn.Linear(4, 3)
    ),
    "two weights side by side": lambda: Net(
        lambda s, x: s.c(torch.tanh(nn.functional.linear(x, torch.cat([s.v, s.w], 0)))),
        v=weights(2, 6),
        w=weights(3, 6),
        c=nn.Linear(5, 3),
    ),
    "one weight in two layers": lambda: Net(
        lambda s, x: s.c(torch.tanh(torch.tanh(x @ s.w) @ s.w.T)), w=weights(6, 4), c=nn.Linear(6, 3)
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_are_protected(name):
    assert_masked_right(COMPUTED[name], (6,))


def test_a_low_rank_update_is_protected_by_rows_and_columns():
    model = MaskedModel(COMPUTED["low-rank update"]())
    assert list(model.graph.layers) == ["a", "c"] or len(model.graph.layers) == 2
    closed = torch.ones(model.n_units)
    first = next(iter(model.graph.layers))
    masks = {name: part.clone() for name, part in model.by_layer(closed).items()}
    masks[first][1] = 0
    use = model.graph.parameter_use(masks)
    assert use["up"].expand(4, 2)[:, 0].tolist() == [1, 0, 1, 1]
    assert bool((use["down"] == 1).all())


def test_a_view_s_sibling_sees_what_was_written():
    def forward(s, x):
        h = torch.tanh(s.a(x))
        u, v = h.view(-1, 2, 2), h.view(-1, 4)
        u.add_(torch.sigmoid(s.b(x)).view(-1, 2, 2))
        return s.c(v)

    assert_masked_right(lambda: Net(forward, a=nn.Linear(6, 4), b=nn.Linear(6, 4), c=nn.Linear(4, 3)), (6,))


# Other modes and types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("late", [False, True])
def test_other_types_of_numbers(dtype, late):
    def forward(s, x):
        positions = torch.arange(4, dtype=x.dtype, device=x.device) / 4
        return s.c(torch.tanh(s.n(s.a(x))) + positions)

    torch.manual_seed(0)
    backbone = Net(forward, a=nn.Linear(6, 4), n=nn.LayerNorm(4), c=nn.Linear(4, 3))
    model = MaskedModel(backbone if late else backbone.to(dtype)).to(dtype).eval()
    x = torch.randn(5, 6, dtype=dtype)
    found = model.masked_features(x, torch.ones(model.n_units))
    assert found.dtype == dtype
    assert_sound(copy.deepcopy(model), x, some_mask(model, 1).float())


def test_gradients_stop_where_the_forward_stops_them():
    def forward(s, x):
        with torch.no_grad():
            fixed = s.a(x)
        return s.c(torch.tanh(fixed) + torch.tanh(s.b(x)).detach() + s.d(x))

    model = MaskedModel(Net(forward, a=nn.Linear(6, 4), b=nn.Linear(6, 4), d=nn.Linear(6, 4), c=nn.Linear(4, 3)))
    model.train().masked_features(torch.randn(5, 6), torch.ones(model.n_units)).sum().backward()
    given = {name for name, parameter in model.backbone.named_parameters() if parameter.grad is not None}
    assert given == {"d.weight", "d.bias", "c.weight", "c.bias"}
