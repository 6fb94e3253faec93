"""Control flow."""

import random

import torch
import torch.ao.nn.qat
import torch.nn.functional as F

from support.leaking_networks.kit import L, abc, ac, accepts, either, net


def on_a_unit(s, x):
    h = s.a(x)
    return s.c(h) if float(h[0, 0].detach()) == 0.0 else s.c(h + 1)


def until_small(s, x):
    h = s.a(x)
    while h.abs().max() > 1:
        h = h / 2
    return s.c(h)


def layers_dropped(s, x):
    h = torch.tanh(s.a(x))
    if s.training and random.random() < 0.5:
        return s.c(h)
    return s.c(h + torch.tanh(s.d(h)))


CONTROL_FLOW_ON_VALUES = ("control flow on the data", "control flow on a unit", "control flow on a parameter")
either("control flow on the data", ac(lambda s, x: s.c(s.a(x)) if x.sum() > 0 else s.c(-s.a(x))))
either("control flow on a unit", ac(on_a_unit))
either("control flow on a parameter", ac(lambda s, x: s.c(s.a(x)) if s.a.weight[0, 0] > 0 else s.c(-s.a(x))))
either("control flow on the number of samples", ac(lambda s, x: s.c(s.a(x)) if x.shape[0] > 3 else s.c(s.a(x) + 1)))
either("control flow on odd batches", abc(lambda s, x: s.c(s.a(x)) if len(x) % 2 else s.c(s.a(x) + s.b(x))))
either("a number from the data", ac(lambda s, x: s.c(s.a(x) * x.abs().max().item())))
either("loop until small", ac(until_small))
either("random path", abc(lambda s, x: s.c(s.a(x)) if random.random() < 0.5 else s.c(s.a(x) + s.b(x))), varies=True)
either("layers dropped at random", net(layers_dropped, a=L(6, 4), d=L(4, 4), c=L(4, 3)), varies=True)
accepts("another path in training", abc(lambda s, x: s.c(s.a(x) if s.training else s.a(x) + s.b(x))))
accepts("another activation in training", ac(lambda s, x: s.c(F.rrelu(s.a(x), training=s.training) + 1)), varies=True)
