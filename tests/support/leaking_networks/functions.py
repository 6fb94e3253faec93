"""Functions of units: arithmetic on masked zeros, constants, units that change places, control flow."""

import random

import torch
import torch.nn.functional as F

from support.leaking_networks.kit import IMAGE, WORDS, K, abc, ac, accepts, beside, between, ec, either, maps
from support.small_networks import L, P

# Arithmetic that distinguishes a masked zero from a missing unit ------------------------------------------------------

ZEROS = {
    "copysign": lambda h: torch.copysign(torch.ones_like(h), h),
    "signbit of a product": lambda h: torch.signbit(h * -1).float(),
    "cosine": lambda h: h.cos(),
    "exponential": lambda h: h.exp(),
    "zero to its power": lambda h: torch.pow(0.0, h.abs()),
    "zeros counted": lambda h: h + (h == 0).sum(1, keepdim=True),
    "mean over no axis": lambda h: torch.tanh(h) + h.mean(dim=()),
    "double precision in between": lambda h: torch.sigmoid(h.double()).to(h.dtype),
}
POLES = {
    "power of minus one": lambda h: h.pow(-1).clamp(-9, 9),
    "infinite where zero": lambda h: torch.isinf(1 / h).float(),
    "sign of the pole": lambda h: (1 / h).clamp(-9, 9).sign(),
    "not a number": lambda h: torch.isnan(0 / h).float(),
    "remainder": lambda h: torch.remainder(torch.ones_like(h), h).nan_to_num(2.0),
    "boolean indexing": lambda h: h + h[h > 0].sum(),
    "different values": lambda h: h + torch.unique(h).numel(),
}
for name, function in ZEROS.items():
    accepts(name, between(function))
for name, function in POLES.items():
    either(name, between(function))
accepts("divided by other units plus one", beside(lambda h, g: h / (g.abs() + 1)))
accepts("larger of two", beside(torch.maximum))
either("power of units", beside(lambda h, g: h.abs() ** g.abs()))
accepts("where, of two branches", abc(lambda s, x: s.c(torch.where(s.d(x) > 0, s.a(x), s.b(x))), d=L(6, 4)))
either("random units", between(lambda h: h + torch.bernoulli(h.sigmoid())), varies=True)
either("random choice by units", between(lambda h: h + F.gumbel_softmax(h, dim=1)), varies=True)
accepts("input beside units as features", ac(lambda s, x: torch.cat([x[:, :2], torch.tanh(s.c(s.a(x)))], 1)))
accepts("signs as features", ac(lambda s, x: torch.copysign(torch.ones(3), s.c(torch.tanh(s.a(x))))))

# Integers, booleans and constants used as values ----------------------------------------------------------------------

POSITIONS = torch.arange(4)

CONSTANTS = {
    "positions beside units, as they are": lambda h: torch.cat([torch.arange(4).expand(h.shape[0], 4), h], 1)[:, :4],
    "integer positions expanded": lambda h: (POSITIONS.expand_as(h) + 1) * h + POSITIONS.expand_as(h),
    "filled like": lambda h: torch.full_like(h, 2) + torch.full_like(h, 3, dtype=torch.long),
    "new tensors": lambda h: torch.cat([h.new_ones(h.shape[0], 2), h.new_full((h.shape[0], 2), 3)], 1),
    "where with integers": lambda h: torch.where(h > 0, POSITIONS, 2).to(h),
    "scatter": lambda h: torch.zeros_like(h).scatter(1, torch.tensor([[3, 2, 1, 0]]).expand(h.shape[0], 4), h) + 1,
    "index_put": lambda h: h.index_put((torch.arange(h.shape[0])[:, None], torch.tensor([0, 2])), torch.tensor(7.0)),
    "threshold": lambda h: F.threshold(h, 0.1, 5.0),
}
for name, function in CONSTANTS.items():
    accepts(name, between(function))


def padding_mask(s, x):
    seen = (x != 0).unsqueeze(-1)
    return s.c((s.e(x) * seen).sum(1) / seen.sum(1).clamp(min=1))


accepts("integer buffer as an index", ac(lambda s, x: s.c(s.a(x)[:, s.n] + s.n), n=K([3, 2, 2, 0])))
either("rows of a parameter by arg max", ac(lambda s, x: s.c(s.a(x) + s.g[s.a(x).argmax(1)]), g=P(4, 4)))
accepts("padding mask from the words", ec(padding_mask), WORDS)
accepts("units gathered by data", ac(lambda s, x: s.c(torch.gather(s.a(x), 1, (x[:, :4] > 0).long()))))

# Samples and units that change places ---------------------------------------------------------------------------------

SAMPLES = {
    "rolled over all": lambda h: h + h.roll(1),
    "samples compared": lambda h: (h @ h.T).softmax(1) @ h,
    "transposed in memory": lambda h: h.T.contiguous().view(-1, 4) + h,
}
UNITS = {  # name → (function, number of units that it returns)
    "repeated units": (lambda h: h.repeat(1, 2) + 1, 8),
    "units repeated one by one": (lambda h: h.repeat_interleave(2, 1) + 1, 8),
    "tiled units": (lambda h: torch.tile(h, (1, 2)) + 1, 8),
    "pooled over units": (lambda h: F.avg_pool1d(torch.tanh(h).unsqueeze(1), 2, 1).flatten(1) + 1, 3),
    "largest of neighbours": (lambda h: F.max_pool1d(h.unsqueeze(1), 2, 1).flatten(1), 3),
    "upsampled": (lambda h: F.interpolate(h.tanh()[:, None], scale_factor=2, mode="linear").flatten(1) + 1, 8),
}
MAPS = {
    "pixel shuffle": (lambda h: F.pixel_shuffle(h, 2), 16),
    "pixel unshuffle": (lambda h: F.pixel_unshuffle(h, 2), 16),
    "windows": (lambda h: h.unfold(2, 2, 1), 16),
}


for name, function in SAMPLES.items():
    either(name, between(function))
for name, (function, width) in UNITS.items():
    accepts(name, between(function, c=L(width, 3)))
for name, (function, width) in MAPS.items():
    accepts(name, maps(function, width), IMAGE)

# Control flow ---------------------------------------------------------------------------------------------------------


def on_a_unit(s, x):
    h = s.a(x)
    return s.c(h) if float(h[0, 0].detach()) == 0.0 else s.c(h + 1)


def until_small(s, x):
    h = s.a(x)
    while h.abs().max() > 1:
        h = h / 2
    return s.c(h)


CONTROL_FLOW_ON_VALUES = ("control flow on the data", "control flow on a unit", "control flow on a parameter")
either("control flow on the data", ac(lambda s, x: s.c(s.a(x)) if x.sum() > 0 else s.c(-s.a(x))))
either("control flow on a unit", ac(on_a_unit))
either("control flow on a parameter", ac(lambda s, x: s.c(s.a(x)) if s.a.weight[0, 0] > 0 else s.c(-s.a(x))))
either("control flow on the number of samples", ac(lambda s, x: s.c(s.a(x)) if x.shape[0] > 3 else s.c(s.a(x) + 1)))
either("a number from the data", ac(lambda s, x: s.c(s.a(x) * x.abs().max().item())))
either("loop until small", ac(until_small))
either("random path", abc(lambda s, x: s.c(s.a(x)) if random.random() < 0.5 else s.c(s.a(x) + s.b(x))), varies=True)
accepts("noise in training", ac(lambda s, x: s.c(s.a(x) + (torch.randn(4) if s.training else 0))), varies=True)
accepts("another path in training", abc(lambda s, x: s.c(s.a(x) if s.training else s.a(x) + s.b(x))))
accepts("another activation in training", ac(lambda s, x: s.c(F.rrelu(s.a(x), training=s.training) + 1)), varies=True)
