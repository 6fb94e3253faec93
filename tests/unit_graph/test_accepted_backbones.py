"""Backbones with unusual forwards: MaskedModel accepts them, computes the same, and protects every masked entry."""

import pytest
import torch
import torch.nn.functional as F
from support.small_networks import Choosing, Net, lived_in, parameter
from support.soundness_oracle import assert_masked_right
from torch import nn
from torch.nn.utils import parametrizations

from avalanche_amnesia import MaskedModel

TOKENS, IMAGE, WORDS = (3, 6), (2, 5, 5), (3,)
PADDED = torch.arange(3) > 0  # no sample is padding throughout


def loop(s, x):
    for layer in s.layers:
        x = torch.relu(layer(x)) + x
    return s.c(x)


def class_token(s, x):
    h = torch.cat([s.t.expand(x.size(0), -1, -1), s.a(x)], 1) + s.g
    return s.c(s.m(h, h, h)[0][:, 0])


def key_padding(s, x):
    h = s.a(x)
    return s.c(s.m(h, h, h, key_padding_mask=(x[..., 0] > 0) & PADDED)[0].mean(1))


def columns(s, x):
    return s.c(torch.tanh(F.linear(x[:, :3], s.w[:, :3])) + torch.tanh(F.linear(x[:, 3:], s.w[:, 3:])))


def made_weight(s, x):
    return torch.bmm(s.o(x).view(-1, 3, 4), s.a(x).unsqueeze(2)).squeeze(2)


def two_norms(s, x):
    h = s.k(x) * s.o(x)
    return s.c((s.n(h) + s.m(h)).mean((2, 3)))


def through_a_view(s, x):
    h = torch.tanh(s.a(x))
    h.view(-1, 4).add_(1)
    return s.c(h)


def through_a_sibling(s, x):
    h = torch.tanh(s.a(x))
    u, v = h.view(-1, 2, 2), h.view(-1, 4)
    u.add_(torch.sigmoid(s.b(x)).view(-1, 2, 2))
    return s.c(v)


def low_rank(s, x):
    return s.c(torch.tanh(F.linear(x, s.a.weight + s.up @ s.down, s.a.bias)))


def noise(s, x):
    h = s.a(x)
    return s.c(torch.tanh(h) + (torch.randn_like(h) if s.training else 0))


def p(*shape):
    return lambda: parameter(*shape)


def linear(*sizes):
    return lambda: nn.Linear(*sizes)


def batch_norm(n):
    return lambda: lived_in(nn.BatchNorm1d(n))


def attention():
    return nn.MultiheadAttention(4, 2, batch_first=True)


def residual_layers():
    return nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])


LAYERS = {"a": linear(6, 4), "b": linear(6, 4), "c": linear(4, 3), "k": lambda: nn.Conv2d(2, 4, 3), "w": p(4, 6)}
# name → (forward, names of usual layers, further parts, shape of one input, options of assert_masked_right)
CASES = {
    "columns of a weight": (columns, "wc", {}),
    "rows of a weight": (
        lambda s, x: s.c(torch.tanh(F.linear(x, s.v[::2])) * torch.tanh(F.linear(x, s.v[1::2]))),
        "c",
        {"v": p(8, 6)},
    ),
    "weight tied with its transpose": (
        lambda s, x: s.d(F.linear(torch.tanh(F.linear(x, s.v)), s.v.t())),
        "",
        {"v": p(6, 6), "d": linear(6, 3)},
    ),
    "bias read again": (lambda s, x: s.c(torch.tanh(s.a(x)) * s.a.bias), "ac", {}),
    "entries of a parameter": (lambda s, x: s.c(s.g[0] * torch.tanh(s.a(x)) + s.g[1] * s.b(x)), "abc", {"g": p(2)}),
    "list of units": (lambda s, x: s.c(torch.sigmoid(s.a(x))[:, [3, 1, 1, 0]]), "ac", {}),
    "padded, then shifted": (
        lambda s, x: s.d(torch.tanh(F.pad(torch.tanh(s.a(x)), (1, 2)) + s.g)),
        "a",
        {"g": p(7), "d": linear(7, 3)},
    ),
    "norm over another axis": (lambda s, x: s.c(torch.tanh(s.a(x)).transpose(1, 2).norm(2, 1)), "ac", {}, (4, 6)),
    "mean over no axis": (lambda s, x: s.c((h := torch.tanh(s.a(x))) + h.mean(dim=())), "ac", {}),
    "gathered by data": (lambda s, x: s.c(torch.gather(s.a(x), 1, (x[:, :4] > 0).long())), "ac", {}),
    "columns chosen by the first sample": (
        lambda s, x: s.c(torch.sigmoid(s.a(x)).index_select(1, (x[0, :4] > 0).long() * 3)),
        "ac",
        {},
        (6,),
        {"same": False},
    ),
    "in place, in a row": (lambda s, x: s.c(s.a(x).mul_(2).add_(s.g).relu_()), "ac", {"g": p(4)}),
    "dtypes": (lambda s, x: s.c(torch.sigmoid(s.a(x).double()).to(x.dtype)), "ac", {}),
    "noise in training": (noise, "ac", {}),
    "list of layers": (loop, "", {"layers": residual_layers, "c": linear(6, 3)}),
    "parameter of the first task": (lambda s, x: s.c(s.a(x) + s.g), "ac", {"g": p(4)}, (6,), {"frozen": ["g"]}),
    "parameter per task": (lambda s, x: s.c(s.a(x) + s.g), "ac", {"g": p(4)}, (6,), {"task_owned": ["g"]}),
    "control flow per task": (lambda s, x: s.c(s.f(s.a(x))), "ac", {"f": Choosing}, (6,), {"task_owned": ["f"]}),
    "class token": (class_token, "ac", {"t": p(1, 1, 4), "g": p(1, 4, 4), "m": attention}, TOKENS),
    "key padding": (key_padding, "ac", {"m": attention}, TOKENS),
    "learned query": (
        lambda s, x: s.c(F.scaled_dot_product_attention(s.q, s.a(x), s.b(x)).mean(1)),
        "abc",
        {"q": p(1, 4)},
        TOKENS,
    ),
    "embedding with positions": (
        lambda s, x: s.c(torch.tanh(s.e(x) + s.g)).mean(1),
        "",
        {"e": lambda: nn.Embedding(10, 4, padding_idx=0), "g": p(3, 4), "c": linear(4, 3)},
        WORDS,
        {"tokens": 10},
    ),
    "embedding tied to the output": (
        lambda s, x: F.linear(s.e(x).mean(1), s.e.weight),
        "",
        {"e": lambda: nn.Embedding(10, 4)},
        WORDS,
        {"tokens": 10},
    ),
    "norm over padding": (
        lambda s, x: s.d(s.n(F.pad(torch.tanh(s.a(x)), (1, 2)))),
        "a",
        {"d": linear(7, 3), "n": batch_norm(7)},
    ),
    "norms of channels under one unit": (
        two_norms,
        "kc",
        {
            "o": lambda: nn.Conv2d(2, 1, 3),
            "n": lambda: lived_in(nn.GroupNorm(2, 4)),
            "m": lambda: nn.BatchNorm2d(4, affine=False),
        },
        IMAGE,
    ),
    "norm over positions": (lambda s, x: s.c(torch.relu(s.n(s.a(x)))).mean(1), "ac", {"n": batch_norm(3)}, TOKENS),
    "norm of the input": (lambda s, x: s.c(s.a(s.n(x))), "ac", {"n": lambda: nn.LayerNorm(6)}),
    "a weight made by the network": (made_weight, "a", {"o": linear(6, 12)}),
    "weight computed": (lambda s, x: s.c(F.linear(x, s.w * s.g)), "wc", {"g": p(4, 1)}),
    "parameter through a function": (lambda s, x: s.c(s.a(x) * s.g.exp()), "ac", {"g": p(4)}),
    "low-rank update": (low_rank, "ac", {"up": p(4, 2), "down": p(2, 6)}),
    "softmax of weights": (lambda s, x: s.c(x @ s.v.softmax(0)), "c", {"v": p(6, 4)}),
    "an unknown function of weights": (lambda s, x: s.c(x @ torch.linalg.qr(s.v)[0]), "c", {"v": p(6, 4)}),
    "two weights side by side": (
        lambda s, x: s.d(torch.tanh(F.linear(x, torch.cat([s.v, s.w], 0)))),
        "w",
        {"v": p(2, 6), "d": linear(6, 3)},
    ),
    "written through a view": (through_a_view, "ac", {}),
    "written through a sibling view": (through_a_sibling, "abc", {}),
    "buffer as a factor": (lambda s, x: s.c(torch.tanh(s.a(x)) * s.n + s.n), "ac", {"n": lambda: torch.arange(4.0)}),
    "buffer as an index": (lambda s, x: s.c(s.a(x).sigmoid()[:, s.n]), "ac", {"n": lambda: torch.tensor([2, 0, 1, 3])}),
    "buffer as a weight": (
        lambda s, x: s.c(F.linear(torch.tanh(s.a(x)), s.n)),
        "ac",
        {"n": lambda: torch.arange(16.0).view(4, 4) / 9},
    ),
}


def build(forward, layers, parts):
    made = {name: make() for name, make in ({layer: LAYERS[layer] for layer in layers} | parts).items()}
    return Net(forward, **made)


@pytest.mark.parametrize("name", CASES)
def test_an_unusual_forward_is_masked_to_the_bit(name):
    forward, layers, parts, shape, options = (*CASES[name], *((6,), {})[len(CASES[name]) - 3 :])
    given = {"input_shape": shape, **options}
    assert_masked_right(lambda: build(forward, layers, parts), shape, **given)


def test_weight_norm_is_masked_to_the_bit():
    assert_masked_right(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)), (6,))


def test_a_low_rank_update_is_protected_by_rows_and_columns():
    model = MaskedModel(build(*CASES["low-rank update"]))
    masks = {name: part.clone() for name, part in model.by_layer(torch.ones(model.n_units)).items()}
    masks[next(iter(model.graph.layers))][1] = 0
    use = model.graph.parameter_use(masks)
    assert use["up"].expand(4, 2)[:, 0].tolist() == [1, 0, 1, 1]
    assert bool((use["down"] == 1).all())
