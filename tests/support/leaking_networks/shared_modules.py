"""Norms, layers and parameters used more than once."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn

from support.leaking_networks.kit import WORDS, L, Net, P, abc, ac, accepts, either, net, part

NORM = part(nn.BatchNorm1d, 4)


def twin_weights():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def twin_biases():
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].bias = net[0].bias
    return net


def weight_under_two_shapes():
    """One parameter as it is, and as another module's with another meaning of its axes."""
    net = Net(
        lambda s, x: s.c(s.e(x).mean(1)) @ s.o.weight.T, e=part(nn.Embedding, 9, 4), c=L(4, 4), o=L(4, 9, bias=False)
    )
    net.o.weight = net.e.weight
    return net


def same_module_under_two_names():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 3))


accepts("norm on two branches", abc(lambda s, x: s.c(torch.tanh(s.n(s.a(x))) * torch.sigmoid(s.n(s.b(x)))), n=NORM))
accepts("norm on two branches, added", abc(lambda s, x: s.c(s.n(s.a(x)) + s.n(s.b(x))), n=NORM))
accepts("norm called twice on the same", ac(lambda s, x: (h := s.a(x), s.c(s.n(h) * torch.tanh(s.n(h))))[1], n=NORM))
accepts("norm after itself", ac(lambda s, x: s.c(s.n(torch.tanh(s.n(s.a(x))).flip(1))), n=NORM))
accepts("layer norm on two branches", abc(lambda s, x: s.c(s.n(s.a(x)) * s.n(s.b(x))), n=part(nn.LayerNorm, 4)))
accepts(
    "one layer on two inputs",
    net(lambda s, x: s.d(s.c(torch.tanh(s.a(x))) + s.c(s.b(x))), a=L(6, 4), b=L(6, 4), c=L(4, 4), d=L(4, 3)),
)
accepts(
    "one layer on its own output",
    net(lambda s, x: s.d(torch.tanh(s.c(torch.tanh(s.c(s.a(x)))))), a=L(6, 4), c=L(4, 4), d=L(4, 3)),
)
accepts("one module under two names", same_module_under_two_names)
either("one weight in two layers", twin_weights)
either("one bias in two layers", twin_biases)
either("embedding tied to the output layer", weight_under_two_shapes, WORDS)
either(
    "embedding tied by F.linear",
    net(lambda s, x: F.linear(torch.tanh(s.c(s.e(x).mean(1))), s.e.weight), e=part(nn.Embedding, 9, 4), c=L(4, 4)),
    WORDS,
)
either(
    "a weight that is a bias too", net(lambda s, x: s.c(torch.tanh(F.linear(x, s.w)) + s.w[:, 0]), w=P(4, 6), c=L(4, 3))
)
either(
    "a row of a weight as a bias", net(lambda s, x: s.c(torch.tanh(s.a(x)) + s.a.weight[0, :4]), a=L(6, 4), c=L(4, 3))
)
either(
    "overlapping rows of one weight",
    net(lambda s, x: s.c(torch.tanh(F.linear(x, s.w[:4])) * F.linear(x, s.w[2:])), w=P(6, 6), c=L(4, 3)),
)
either(
    "overlapping columns of one weight",
    net(
        lambda s, x: s.c(torch.tanh(F.linear(x[:, :4], s.w[:, :4])) * F.linear(x[:, 2:], s.w[:, 2:])),
        w=P(4, 6),
        c=L(4, 3),
    ),
)
either(
    "a weight and its transpose",
    net(lambda s, x: s.c(F.linear(torch.tanh(F.linear(x, s.w)), s.w.T)), w=P(4, 6), c=L(6, 3)),
)
either(
    "a weight and its flipped self",
    net(lambda s, x: s.c(torch.tanh(F.linear(x, s.w)) + F.linear(x, s.w.flip(0))), w=P(4, 6), c=L(4, 3)),
)
either(
    "a weight seen through another shape",
    net(lambda s, x: s.c(F.linear(x, s.w.view(4, 6)) * F.linear(x[:, :4], s.w.view(6, 4)[:4])), w=P(24), c=L(4, 3)),
)
either("mean of another layer's weight", abc(lambda s, x: s.c(s.a(x) + s.b(x) * s.a.weight.mean())))
either("norm of a weight as a factor", ac(lambda s, x: s.c(s.a(x) / s.a.weight.norm())))
either("a weight detached", ac(lambda s, x: s.c(s.a(x) + F.linear(x, s.a.weight.detach().roll(1, 0)))))
either("all parameters summed", ac(lambda s, x: s.c(s.a(x) + sum(p.sum() for p in s.parameters()))))
either("largest entry of a weight", ac(lambda s, x: s.c(s.a(x) * s.c.weight.amax())))
either("sorted parameter", ac(lambda s, x: s.c(s.a(x) + s.g.sort().values), g=P(4)))
either("parameter as a condition", ac(lambda s, x: s.c(torch.where(s.g > 0, s.a(x), x[:, :4])), g=P(4)))
either("parameter written in place", ac(lambda s, x: (s.g.data.clamp_(-0.1, 0.1), s.c(s.a(x) * s.g))[1], g=P(4)))
either("parameter normalised", ac(lambda s, x: s.c(s.a(x) * F.normalize(s.g, dim=0)), g=P(4)))
either("softmax of a parameter", ac(lambda s, x: s.c(s.a(x) * s.g.softmax(0)), g=P(4)))
either(
    "parameters in a list, one twice",
    net(
        lambda s, x: s.c(s.g[0] * s.a(x) + s.g[1] * s.b(x) + s.g[0]),
        a=L(6, 4),
        b=L(6, 4),
        c=L(4, 3),
        g=lambda: nn.ParameterList([P(4)(), P(4)()]),
    ),
)
