"""Layers: computed weights, layers written as functions, attention, modules and parameters that are used twice."""

from functools import partial

import timm.layers
import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig
from torch.nn.utils import parametrizations

from support.leaking_networks.kit import FLAT, IMAGE, TOKENS, WORDS, K, abc, ac, accepts, ec, either, kc, part, wc
from support.small_networks import C, Choosing, L, P, parts

# Weights that are computed from other weights -------------------------------------------------------------------------


def standard(weight):
    """Scale the weights of each unit to mean 0 and deviation 1: a change of one entry changes the whole row."""
    flat = weight.flatten(1)
    flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
    return flat.view_as(weight)


class ConvForwardStandardises(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, standard(weight), bias)


def after_units(make):
    """Return a factory of a network whose middle layer reads four units and has four."""
    return lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), make(), nn.Tanh(), nn.Linear(4, 3))


def after_maps(kind, *options, **named):
    forward = lambda s, x: s.c(torch.tanh(s.k(torch.tanh(s.a(x)))).flatten(1))  # noqa: E731
    return kc(forward, a=C(2, 4, 3), k=part(kind, 4, 4, 2, *options, **named))


def with_forward(forward):
    """Return a factory of linear layers whose forward computes the weight first."""
    kind = type("ComputedLinear", (nn.Linear,), {"forward": lambda s, x: F.linear(x, forward(s.weight), s.bias)})
    return after_units(part(kind, 4, 4))


def reparametrised(function, **options):
    return after_units(lambda: function(nn.Linear(4, 4), **options))


def mixture(s, x):
    return s.c(F.linear(torch.tanh(s.a(x)), (s.g.softmax(0)[:, None, None] * s.w).sum(0)))


def functional_call(s, x):
    return torch.func.functional_call(s.c, {"weight": standard(s.c.weight)}, (torch.tanh(s.a(x)),))


accepts("convolution whose _conv_forward standardises", after_maps(ConvForwardStandardises), IMAGE)
accepts("timm's ScaledStdConv2d", after_maps(timm.layers.ScaledStdConv2d), IMAGE)
BINARY = with_forward(lambda weight: weight + (weight.sign() * weight.abs().mean() - weight).detach())
either("signs of weights under one scale", BINARY)
either("the larger half of the weights", with_forward(lambda weight: weight * (weight.abs() >= weight.abs().median())))
either("mixture of weights", ac(mixture, g=P(2), w=P(2, 4, 4)))
either("weight centred through functional_call", ac(functional_call))
either("weight norm over all", reparametrised(parametrizations.weight_norm, dim=None))
accepts("orthogonal weight", reparametrised(parametrizations.orthogonal))
either("older weight norm", reparametrised(nn.utils.weight_norm))
QAT = get_default_qat_qconfig("fbgemm")
either("convolution for quantisation", after_maps(torch.ao.nn.qat.Conv2d, qconfig=QAT), IMAGE)

# Layers written as functions ------------------------------------------------------------------------------------------


def transposed(s, x):
    return s.c(F.conv_transpose2d(torch.tanh(s.k(x)), s.w).mean((2, 3)))


RIGHT = {"w": P(6, 4)}
accepts("F.conv_transpose2d", kc(transposed, w=P(4, 4, 2, 2)), IMAGE)
either("einsum with a weight", wc(lambda s, x: s.c(torch.einsum("bi,oi->bo", x, s.w))))
either("addmm", wc(lambda s, x: s.c(torch.tanh(torch.addmm(s.v, x, s.w))), v=P(4), **RIGHT))
either("addmm with factors", ac(lambda s, x: s.c(torch.addmm(s.a(x), x, s.w, beta=2, alpha=3)), **RIGHT))
either("addmv", ac(lambda s, x: s.c((s.a(x) @ s.g).unsqueeze(1) * s.a(x)), g=P(4)))
MAX_NORM = part(nn.Embedding, 9, 4, max_norm=1.0)
either("embedding with a largest norm", ec(lambda s, x: s.c(s.e(x).mean(1)), e=MAX_NORM), WORDS)

# Recurrent layers and attention ---------------------------------------------------------------------------------------


def lstm(s, x):
    return s.c(s.r(s.a(x))[0][:, -1])


LSTM = part(nn.LSTM, 4, 4, batch_first=True)
accepts("lstm per task", ac(lstm, r=LSTM), TOKENS, {"task_owned": ["r"]})
accepts("lstm of the first task", ac(lstm, r=LSTM), TOKENS, {"frozen": ["r"]})


def attention(**options):
    return part(nn.MultiheadAttention, 4, 2, **{"batch_first": True, **options})


def cross(s, x):
    return s.c(s.m(s.a(x), h := torch.tanh(s.b(x)), h)[0].mean(1))


def self_attention(s, x, **options):
    h = s.a(x)
    return s.c(s.m(h, h, h, **options)[0].mean(1))


def padding(x):
    return (x[..., 0] > 0) & (torch.arange(3) > 0)


def biased(bias):
    def forward(s, x):
        h = s.a(x)
        return s.c(F.scaled_dot_product_attention(h, h, h, attn_mask=bias(s, h)).mean(1))

    return forward


CAUSAL = torch.triu(torch.ones(3, 3), 1).bool()
ENCODER_LAYER = part(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)
accepts("cross-attention", abc(cross, m=attention()), TOKENS)
accepts("attention with a mask", ac(partial(self_attention, attn_mask=CAUSAL), m=attention()), TOKENS)
accepts("attention of dropped weights", ac(self_attention, m=attention(dropout=0.5)), TOKENS, varies=True)
either("attention with one more learned key", ac(self_attention, m=attention(add_bias_kv=True)), TOKENS)
KEYS = attention(kdim=6, vdim=5)
OF_OTHER_WIDTH = abc(lambda s, x: s.c(s.m(s.a(x), x, torch.tanh(s.b(x)))[0].mean(1)), b=L(6, 5), m=KEYS)
either("attention to keys of another width", OF_OTHER_WIDTH, TOKENS)
PADDED = ac(lambda s, x: s.c(s.m(s.a(x), src_key_padding_mask=padding(x)).mean(1)), m=ENCODER_LAYER)
either("encoder layer with a padding mask", PADDED, TOKENS)
LEARNED = ac(
    lambda s, x: s.c(F.scaled_dot_product_attention(s.a(x)[:, None], s.q, s.v)[:, 0]), q=P(1, 5, 4), v=P(1, 5, 4)
)
either("learned keys and values", LEARNED)
either("attention mask from units", ac(biased(lambda s, h: (h @ h.mT) > 0)), TOKENS)

# Norms, layers and parameters that are used more than once ------------------------------------------------------------

NORM = part(nn.BatchNorm1d, 4)


def twins(width, name):
    """Return a factory of networks in which two layers share a parameter."""

    def make():
        net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
        setattr(net[2], name, getattr(net[0], name))
        return net

    return make


def weight_under_two_shapes():
    """One parameter in two modules, which read its axes in different ways."""
    forward = lambda s, x: s.c(s.e(x).mean(1)) @ s.o.weight.T  # noqa: E731
    net = ec(forward, c=L(4, 4), o=L(4, 9, bias=False))()
    net.o.weight = net.e.weight
    return net


def tied(s, x):
    return F.linear(torch.tanh(s.c(s.e(x).mean(1))), s.e.weight)


accepts("norm on two branches", abc(lambda s, x: s.c(torch.tanh(s.n(s.a(x))) * torch.sigmoid(s.n(s.b(x)))), n=NORM))
accepts("norm after itself", ac(lambda s, x: s.c(s.n(torch.tanh(s.n(s.a(x))).flip(1))), n=NORM))
accepts("one weight in two layers", twins(6, "weight"))
accepts("embedding tied to the output layer", weight_under_two_shapes, WORDS)
accepts("embedding tied by F.linear", ec(tied, c=L(4, 4)), WORDS)
either("a row of a weight as a bias", ac(lambda s, x: s.c(torch.tanh(s.a(x)) + s.a.weight[0, :4])))
OVERLAPPING = wc(lambda s, x: s.c(torch.tanh(F.linear(x, s.w[:4])) * F.linear(x, s.w[2:])), w=P(6, 6))
either("overlapping rows of one weight", OVERLAPPING)
either("a weight and its flipped self", wc(lambda s, x: s.c(torch.tanh(F.linear(x, s.w)) + F.linear(x, s.w.flip(0)))))
either("a weight detached", ac(lambda s, x: s.c(s.a(x) + F.linear(x, s.a.weight.detach().roll(1, 0)))))
either("all parameters summed", ac(lambda s, x: s.c(s.a(x) + sum(p.sum() for p in s.parameters()))))
either("largest entry of a weight", ac(lambda s, x: s.c(s.a(x) * s.c.weight.amax())))
either("parameter as a condition", ac(lambda s, x: s.c(torch.where(s.g > 0, s.a(x), x[:, :4])), g=P(4)))
either("parameter written in place", ac(lambda s, x: (s.g.data.clamp_(-0.1, 0.1), s.c(s.a(x) * s.g))[1], g=P(4)))
either("parameter normalised", ac(lambda s, x: s.c(s.a(x) * F.normalize(s.g, dim=0)), g=P(4)))


PLUS = ac(lambda s, x: s.c(s.a(x) + s.g), g=P(4))
COLUMNS = wc(lambda s, x: s.c(torch.tanh(F.linear(x[:, :3], s.w[:, :3])) * F.linear(x[:, 3:], s.w[:, 3:])))
accepts("separate columns of one weight", COLUMNS)
BOTH = wc(lambda s, x: s.c(torch.tanh(F.linear(x, torch.cat([s.v, s.w], 0)))), v=P(2, 6), c=L(6, 3))
accepts("two weights side by side", BOTH)
MADE = parts(lambda s, x: torch.bmm(s.o(x).view(-1, 3, 4), s.a(x).unsqueeze(2)).squeeze(2), a=L(6, 4), o=L(6, 12))
accepts("a weight made by the network", MADE)
accepts("a buffer as a weight", ac(lambda s, x: s.c(F.linear(s.a(x), s.n)), n=K(torch.arange(16.0).view(4, 4) / 9)))
accepts("a parameter through a function", ac(lambda s, x: s.c(s.a(x) * s.g.tanh()), g=P(4)))
accepts("parameter of the first task", PLUS, FLAT, {"frozen": ["g"]})
accepts("parameter per task", PLUS, FLAT, {"task_owned": ["g"]})
accepts("control flow per task", ac(lambda s, x: s.c(s.f(s.a(x))), f=Choosing), FLAT, {"task_owned": ["f"]})
NORMS = {"n": part(nn.GroupNorm, 2, 4), "m": part(nn.BatchNorm2d, 4, affine=False)}
TWO_NORMS = kc(lambda s, x: s.c((s.n(h := s.k(x) * s.o(x)) + s.m(h)).mean((2, 3))), o=C(2, 1, 3), **NORMS)
accepts("norms of channels under one unit", TWO_NORMS, IMAGE)
accepts("norm of the input", ac(lambda s, x: s.c(s.a(s.n(x))), n=part(nn.LayerNorm, 6)))


class ReadsAnother(nn.Module):
    """Uses the weight of a layer elsewhere in the network, which is no submodule of it."""

    def __init__(self, other):
        super().__init__()
        self.l, self.other = nn.Linear(4, 4), (other,)

    def forward(self, x):
        return self.l(x) + self.other[0].weight.sum(0)[:4]


def reads_another():
    first = nn.Linear(6, 4)
    return nn.Sequential(first, ReadsAnother(first), nn.Linear(4, 3))


either("frozen module that reads another layer", reads_another, FLAT, {"frozen": ["1"]})
either("task's own module that reads another layer", reads_another, FLAT, {"task_owned": ["1"]})
