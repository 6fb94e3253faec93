"""Modules as people write them, and worse: each is masked right to the bit, or refused by name, never half covered."""

import pytest
import torch
import torch.nn.functional as F
from support.small_networks import Net
from support.soundness_oracle import assert_masked_right
from torch import nn
from torch.nn.utils import parametrizations

from avalanche_amnesia import MaskedModel, ModelError

Linear, Conv2d, MultiheadAttention = nn.Linear, nn.Conv2d, nn.MultiheadAttention


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


def a_c(**parts) -> dict[str, object]:
    """Two layers to put something between."""
    return {"a": Linear(6, 4), "c": Linear(4, 3), **parts}


def a_b_c(**parts) -> dict[str, object]:
    return {"a": Linear(6, 4), "b": Linear(6, 4), "c": Linear(4, 3), **parts}


def k_c(**parts) -> dict[str, object]:
    return {"k": Conv2d(2, 4, 3), "c": Linear(4, 3), **parts}


@torch.no_grad()
def lived_in(norm: nn.Module) -> nn.Module:
    for value in norm.parameters():
        value.normal_()
    return norm


def with_buffer(net: nn.Module, value: torch.Tensor) -> nn.Module:
    net.register_buffer("buffer", value)
    return net


class Choosing(nn.Module):
    """Its control flow looks at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.l = Linear(4, 4)

    def forward(self, x):
        return self.l(x) if x.sum() > 0 else -self.l(x)


def two_tensors(s, x):
    first, second = torch.tanh(s.a(x)).chunk(2, 1)
    return s.c(torch.cat([second, first * torch.sigmoid(second), first], 1))


def loop(s, x):
    for layer in s.layers:
        x = torch.relu(layer(x)) + x
    return s.c(x)


def learned_query(s, x):
    return s.c(F.scaled_dot_product_attention(s.q, s.a(x), s.b(x)).mean(1))


TOKENS, IMAGE = (3, 6), (2, 5, 5)
CAUSAL = torch.triu(torch.ones(3, 3), 1).bool()

# name → (forward, parts, shape of an input, further arguments of assert_masked_right)
MASKED = {
    "F.linear": (lambda s, x: s.c(F.linear(x, s.w, s.v)), lambda: {"w": p(4, 6), "v": p(4), "c": Linear(4, 3)}, (6,)),
    "columns of a weight": (
        lambda s, x: s.c(torch.tanh(F.linear(x[:, :3], s.w[:, :3])) + torch.tanh(F.linear(x[:, 3:], s.w[:, 3:]))),
        lambda: {"w": p(4, 6), "c": Linear(4, 3)},
        (6,),
    ),
    "every other row of a weight": (
        lambda s, x: s.c(torch.tanh(F.linear(x, s.w[::2])) * torch.tanh(F.linear(x, s.w[1::2]))),
        lambda: {"w": p(8, 6), "c": Linear(4, 3)},
        (6,),
    ),
    "weight tied with its transpose": (
        lambda s, x: s.c(F.linear(torch.tanh(F.linear(x, s.w)), s.w.t())),
        lambda: {"w": p(6, 6), "c": Linear(6, 3)},
        (6,),
    ),
    "a layer's bias read again": (lambda s, x: s.c(torch.tanh(s.a(x)) * s.a.bias), a_c, (6,)),
    "entries of one parameter": (
        lambda s, x: s.c(s.g[0] * torch.tanh(s.a(x)) + s.g[1] * s.b(x)),
        lambda: a_b_c(g=p(2)),
        (6,),
    ),
    "one layer on two branches": (
        lambda s, x: s.d(torch.cat([s.c(torch.tanh(s.a(x))), s.c(torch.tanh(s.b(x)))], 1)),
        lambda: a_b_c(d=Linear(6, 3)),
        (6,),
    ),
    "three paths": (
        lambda s, x: s.c(torch.cat([s.a(x), x, torch.sigmoid(s.b(x))], 1)),
        lambda: {"a": Linear(6, 4), "b": Linear(6, 2), "c": Linear(12, 3)},
        (6,),
    ),
    "halves gated": (two_tensors, lambda: {"a": Linear(6, 8), "c": Linear(12, 3)}, (6,)),
    "every other unit": (lambda s, x: s.c(torch.sigmoid(s.a(x))[:, ::2]), lambda: a_c(c=Linear(2, 3)), (6,)),
    "units picked by a list": (lambda s, x: s.c(torch.sigmoid(s.a(x))[:, [3, 1, 1, 0]]), a_c, (6,)),
    "rolled": (lambda s, x: s.c(torch.roll(torch.tanh(s.a(x)), 1, 1)), a_c, (6,)),
    "shuffled channels": (lambda s, x: s.c(F.channel_shuffle(torch.sigmoid(s.k(x)), 2).mean((2, 3))), k_c, IMAGE),
    "pixels shuffled": (
        lambda s, x: s.c(F.pixel_shuffle(torch.sigmoid(s.k(x)), 2).flatten(1)),
        lambda: k_c(c=Linear(36, 3)),
        IMAGE,
    ),
    "padded, then shifted": (
        lambda s, x: s.c(torch.tanh(F.pad(torch.tanh(s.a(x)), (1, 2)) + s.g)),
        lambda: a_c(g=p(7), c=Linear(7, 3)),
        (6,),
    ),
    "outer product": (
        lambda s, x: s.c(torch.einsum("bi,bj->bij", torch.tanh(s.a(x)), torch.tanh(s.b(x))).flatten(1)),
        lambda: a_b_c(c=Linear(16, 3)),
        (6,),
    ),
    "norm over another axis": (
        lambda s, x: s.c(torch.tanh(s.a(x)).transpose(1, 2).norm(2, 1)),
        a_c,
        (4, 6),
        {"input_shape": (4, 6)},
    ),
    "mean over no axis": (lambda s, x: s.c((h := torch.tanh(s.a(x))) + h.mean(dim=())), a_c, (6,)),
    "divided by its sum": (lambda s, x: s.c((h := torch.sigmoid(s.a(x))) / (h.sum(1, keepdim=True) + 1)), a_c, (6,)),
    "softmax gate": (lambda s, x: s.c(torch.tanh(s.a(x)) * F.softmax(s.b(x), 1)), a_b_c, (6,)),
    "sorted": (lambda s, x: s.c(torch.sort(s.a(x), 1)[0]), a_c, (6,)),
    "gathered by data": (lambda s, x: s.c(torch.gather(s.a(x), 1, (x[:, :4] > 0).long())), a_c, (6,)),
    "columns chosen by data": (
        lambda s, x: s.c(torch.sigmoid(s.a(x)).index_select(1, (x[0, :4] > 0).long() * 3)),
        a_c,
        (6,),
        {"same": False},  # by the first sample of a batch
    ),
    "where": (lambda s, x: s.c(torch.where(s.a(x) > 0, torch.tanh(s.b(x)), 0.3)), a_b_c, (6,)),
    "in place, in a row": (lambda s, x: s.c(s.a(x).mul_(2).add_(s.g).relu_()), lambda: a_c(g=p(4)), (6,)),
    "constants made in forward": (
        lambda s, x: s.c(torch.tanh(s.a(x)) * torch.tensor([1.0, 2, 3, 4]) + torch.arange(4)),
        a_c,
        (6,),
    ),
    "dtypes": (lambda s, x: s.c(torch.sigmoid(s.a(x).double()).to(x.dtype)), a_c, (6,)),
    "dropout": (lambda s, x: s.c(F.dropout(torch.sigmoid(s.a(x)), 0.5, s.training)), a_c, (6,)),
    "noise in training": (
        lambda s, x: s.c(torch.tanh(s.a(x)) + (torch.randn_like(s.a(x)) if s.training else 0)),
        a_c,
        (6,),
    ),
    "another path in training": (lambda s, x: s.c(s.a(x) if s.training else s.b(x)), a_b_c, (6,)),
    "list of layers": (loop, lambda: {"layers": nn.ModuleList([Linear(6, 6), Linear(6, 6)]), "c": Linear(6, 3)}, (6,)),
    "lstm per task": (
        lambda s, x: s.c(s.r(s.a(x))[0][:, -1]),
        lambda: a_c(r=nn.LSTM(4, 4, batch_first=True)),
        TOKENS,
        {"task_owned": ["r"], "input_shape": TOKENS},
    ),
    "gru of the first task": (
        lambda s, x: s.c(s.r(s.a(x))[1][0]),
        lambda: a_c(r=nn.GRU(4, 4, batch_first=True)),
        TOKENS,
        {"frozen": ["r"], "input_shape": TOKENS},
    ),
    "parameter of the first task": (lambda s, x: s.c(s.a(x) + s.g), lambda: a_c(g=p(4)), (6,), {"frozen": ["g"]}),
    "parameter per task": (lambda s, x: s.c(s.a(x) + s.g), lambda: a_c(g=p(4)), (6,), {"task_owned": ["g"]}),
    "control flow per task": (lambda s, x: s.c(s.f(s.a(x))), lambda: a_c(f=Choosing()), (6,), {"task_owned": ["f"]}),
    "attention, masked": (
        lambda s, x: s.c(s.m(h := s.a(x), h, h, attn_mask=CAUSAL)[0].mean(1)),
        lambda: a_c(m=MultiheadAttention(4, 2, batch_first=True)),
        TOKENS,
        {"input_shape": TOKENS},
    ),
    "encoder, positions first": (
        lambda s, x: s.c(s.m(s.a(x).transpose(0, 1)).mean(0)),
        lambda: a_c(m=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False)),
        TOKENS,
        {"input_shape": TOKENS},
    ),
    "class token and learned positions": (
        lambda s, x: s.c(s.m(*(torch.cat([s.t.expand(x.size(0), -1, -1), s.a(x)], 1) + s.g,) * 3)[0][:, 0]),
        lambda: a_c(t=p(1, 1, 4), g=p(1, 4, 4), m=MultiheadAttention(4, 2, batch_first=True)),
        TOKENS,
        {"input_shape": TOKENS},
    ),
    "embedding with learned positions": (
        lambda s, x: s.c(torch.tanh(s.e(x) + s.g)).mean(1),
        lambda: {"e": nn.Embedding(10, 4, padding_idx=0), "g": p(3, 4), "c": Linear(4, 3)},
        (3,),
        {"tokens": 10, "input_shape": (3,)},
    ),
    "norm over padding": (
        lambda s, x: s.c(s.n(F.pad(torch.tanh(s.a(x)), (1, 2)))),
        lambda: a_c(c=Linear(7, 3), n=lived_in(nn.BatchNorm1d(7))),
        (6,),
    ),
    "norms of channels under one unit": (
        lambda s, x: s.c((s.n(h := s.k(x) * s.b(x)) + s.m(h)).mean((2, 3))),
        lambda: k_c(b=Conv2d(2, 1, 3), n=lived_in(nn.GroupNorm(2, 4)), m=nn.BatchNorm2d(4, affine=False)),
        IMAGE,
    ),
    "norm over positions": (
        lambda s, x: s.c(torch.relu(s.n(s.a(x)))).mean(1),
        lambda: a_c(n=lived_in(nn.BatchNorm1d(3))),
        TOKENS,
        {"input_shape": TOKENS},
    ),
    "one norm twice": (
        lambda s, x: s.c(s.n(torch.tanh(s.d(s.n(s.a(x)))))),
        lambda: a_c(d=Linear(4, 4), n=lived_in(nn.BatchNorm1d(4))),
        (6,),
    ),
    "norm of the input": (lambda s, x: s.c(s.a(s.n(x))), lambda: a_c(n=nn.LayerNorm(6)), (6,)),
    "a weight made by the network": (
        lambda s, x: torch.bmm(s.b(x).view(-1, 3, 4), s.a(x).unsqueeze(2)).squeeze(2),
        lambda: {"a": Linear(6, 4), "b": Linear(6, 12)},
        (6,),
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_to_the_bit(name):
    forward, parts, shape, *options = MASKED[name]
    assert_masked_right(lambda: Net(forward, **parts()), shape, **dict(*options))


@pytest.mark.parametrize(
    ("forward", "value"),
    [
        (lambda s, x: s.c(torch.tanh(s.a(x)) * s.buffer + s.buffer), torch.arange(4.0)),
        (lambda s, x: s.c(torch.sigmoid(s.a(x))[:, s.buffer]), torch.tensor([2, 0, 1, 3])),
        (lambda s, x: s.c(F.linear(torch.tanh(s.a(x)), s.buffer)), torch.arange(16.0).view(4, 4) / 9),
    ],
)
def test_buffers_that_stay_as_they_are(forward, value):
    assert_masked_right(lambda: with_buffer(Net(forward, **a_c()), value.clone()), (6,))


REFUSED = {
    "parameter past the masks": (lambda: Net(lambda s, x: s.c(s.a(x) * s.g.data), **a_c(g=p(4))), "can't be exported"),
    "einsum with a parameter": (
        lambda: Net(lambda s, x: s.c(torch.einsum("bi,oi->bo", x, s.w)), w=p(4, 6), c=Linear(4, 3)),
        "'einsum'.*parameters",
    ),
    "table read by index": (
        lambda: Net(lambda s, x: s.c(s.a(x) + s.t[(x[:, 0] > 0).long()]), **a_c(t=p(2, 4))),
        "parameters",
    ),
    "clamped by a parameter": (
        lambda: Net(lambda s, x: s.c(torch.clamp(s.a(x), min=s.g)), **a_c(g=p(4))),
        "'clamp'.*given parameters",
    ),
    "in place through a part": (
        lambda: Net(lambda s, x: (h := torch.tanh(s.a(x)), h.chunk(2, 1)[0].sigmoid_(), s.c(h))[2], **a_c()),
        "modified inplace",
    ),
    "into another's memory": (
        lambda: Net(lambda s, x: (h := torch.tanh(s.a(x)), torch.mul(s.b(x), 2, out=h), s.c(h))[2], **a_b_c()),
        "out=|no mask would protect",
    ),
    "buffer counted up": (
        lambda: with_buffer(Net(lambda s, x: (s.buffer.add_(1), s.c(s.a(x) * s.buffer))[1], **a_c()), torch.ones(4)),
        "writes to buffer 'buffer'",
    ),
    "running mean by hand": (
        lambda: with_buffer(
            Net(lambda s, x: (s.buffer.mul_(0.9).add_(x[0, :4]), s.c(s.a(x) - s.buffer))[1], **a_c()), torch.ones(4)
        ),
        "writes (to|in place into).*buffer",
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(Linear(6, 4)), Linear(4, 3)),
        "bake the parametrisation in",
    ),
    "layers in a plain list": (
        lambda: Net(lambda s, x: s.c(s.layers[0](x)), c=Linear(4, 3), layers=[Linear(6, 4)]),
        "learns and is no parameter",
        {"input_shape": (6,)},
    ),
    "gru": (
        lambda: Net(lambda s, x: s.c(s.r(x)[1][0]), r=nn.GRU(6, 4), c=Linear(4, 3)),
        "'gru'.*given parameters|one size",
        {"input_shape": TOKENS},
    ),
    "control flow inside": (lambda: Net(lambda s, x: s.c(s.f(s.a(x))), **a_c(f=Choosing())), "control flow"),
}


PADDED = torch.arange(TOKENS[0]) > 0  # no sample is all padding

# Weights that are computed, one parameter in two places, memory written through a view.
COMPUTED = {
    "weight computed": (lambda: Net(lambda s, x: s.c(F.linear(x, s.w * s.g)), w=p(4, 6), g=p(4, 1), c=Linear(4, 3)),),
    "parameter through a function": (lambda: Net(lambda s, x: s.c(s.a(x) * s.g.exp()), **a_c(g=p(4))),),
    "learned query": (lambda: Net(learned_query, **a_b_c(q=p(1, 4))), {"input_shape": TOKENS}),
    "embedding tied to the output": (
        lambda: Net(lambda s, x: F.linear(s.e(x).mean(1), s.e.weight), e=nn.Embedding(10, 4)),
        {"input_shape": (3,)},
    ),
    "in place through a view": (
        lambda: Net(lambda s, x: (h := torch.tanh(s.a(x)), h.view(-1, 4).add_(1), s.c(h))[2], **a_c()),
    ),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(Linear(6, 4)), Linear(4, 3)),),
    "key padding": (
        lambda: Net(
            lambda s, x: s.c(s.m(h := s.a(x), h, h, key_padding_mask=(x[..., 0] > 0) & PADDED)[0].mean(1)),
            **a_c(m=MultiheadAttention(4, 2, batch_first=True)),
        ),
        {"input_shape": TOKENS},
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_operations_do_with_parameters_decides(name):
    make, *options = COMPUTED[name]
    shape = dict(*options).get("input_shape", (6,))
    assert_masked_right(make, shape, **dict(*options), **({"tokens": 10} if "embedding" in name else {}))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, message, *options = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=message):
        MaskedModel(make(), **dict(*options))
