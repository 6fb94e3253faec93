"""Functions of units: arithmetic on masked zeros, constants, units that change places, control flow."""

import random

import torch
import torch.nn.functional as F

from support.leaking_networks.kit import (
    IMAGE,
    TOKENS,
    WORDS,
    E,
    K,
    L,
    P,
    abc,
    ac,
    accepts,
    acd,
    beside,
    between,
    ec,
    either,
    maps,
)

# Arithmetic that distinguishes a masked zero from a missing unit ------------------------------------------------------

ZEROS = {
    "copysign": lambda h: torch.copysign(torch.ones_like(h), h),
    "atan2": lambda h: torch.atan2(h, -torch.ones_like(h)),
    "signbit": lambda h: h.signbit().float(),
    "signbit of a product": lambda h: torch.signbit(h * -1).float(),
    "angle": lambda h: torch.angle(h),
    "not a zero": lambda h: h.logical_not().float(),
    "is zero": lambda h: h.eq(0).float(),
    "equals zero": lambda h: (h == 0).float() * 2,
    "sign": lambda h: h.sign() + 1,
    "cosine": lambda h: h.cos(),
    "exponential": lambda h: h.exp(),
    "zero to its power": lambda h: torch.pow(0.0, h.abs()),
    "heaviside": lambda h: torch.heaviside(h, torch.tensor(0.5)),
    "clamped from below": lambda h: h.clamp(min=0.5),
    "largest unit": lambda h: h * h.amax(1, keepdim=True) + h.amax(1, keepdim=True),
    "smallest unit": lambda h: h + h.min(1, keepdim=True).values,
    "softmax over units": lambda h: h.softmax(1),
    "log-softmax over units": lambda h: h.log_softmax(1),
    "logsumexp over units": lambda h: h + h.logsumexp(1, keepdim=True),
    "product over units": lambda h: h + h.prod(1, keepdim=True),
    "product over units plus one": lambda h: h * (h + 1).prod(1, keepdim=True),
    "norm over units": lambda h: h + h.norm(dim=1, keepdim=True),
    "zeros counted": lambda h: h + (h == 0).sum(1, keepdim=True),
    "units that are not zero": lambda h: h + torch.count_nonzero(h, 1).unsqueeze(1),
    "deviation over units": lambda h: h + h.std(1, keepdim=True),
    "median over units": lambda h: h + h.median(1, keepdim=True).values,
    "distance to ones": lambda h: h + torch.cdist(h, torch.ones(1, 4)),
    "arg max as an index": lambda h: h + h.gather(1, h.argmax(1, keepdim=True)),
    "cumulative largest": lambda h: h.cummax(1).values,
    "shares of the sum": lambda h: h.abs() / (h.abs().sum(1, keepdim=True) + 1),
    "mean over no axis": lambda h: torch.tanh(h) + h.mean(dim=()),
    "double precision in between": lambda h: torch.sigmoid(h.double()).to(h.dtype),
}
POLES = {
    "bits": lambda h: (h.view(torch.int32) >> 31).float() + 1,
    "one over": lambda h: (1 / h).clamp(-9, 9),
    "divided by itself": lambda h: (h / h).nan_to_num(3.0),
    "square root": lambda h: h.abs().sqrt(),
    "inverse root": lambda h: h.abs().rsqrt().clamp(max=9),
    "logarithm": lambda h: h.abs().log().clamp(min=-9),
    "power of minus one": lambda h: h.pow(-1).clamp(-9, 9),
    "divided by the sum": lambda h: (h / h.sum(1, keepdim=True)).nan_to_num(1.0).clamp(-9, 9),
    "normalised": lambda h: F.normalize(h, dim=1),
    "infinite where zero": lambda h: torch.isinf(1 / h).float(),
    "sign of the pole": lambda h: (1 / h).clamp(-9, 9).sign(),
    "not a number": lambda h: torch.isnan(0 / h).float(),
    "remainder": lambda h: torch.remainder(torch.ones_like(h), h).nan_to_num(2.0),
    "next number": lambda h: torch.nextafter(h, torch.ones_like(h)) * 1e30,
    "mantissa": lambda h: torch.frexp(h)[0] + 1,
    "boolean indexing": lambda h: h + h[h > 0].sum(),
    "non-zero units": lambda h: h + torch.nonzero(h).sum(),
    "different values": lambda h: h + torch.unique(h).numel(),
}
BESIDE_ACCEPTED = {
    "divided by other units plus one": lambda h, g: h / (g.abs() + 1),
    "where, as a gate of itself": lambda h, g: torch.where(h > 0, h, g),
    "larger of two": torch.maximum,
    "compared": lambda h, g: (h > g).float() + (h == g).float(),
    "lerp": lambda h, g: torch.lerp(h, g, 0.3),
    "sums of squares": torch.hypot,
    "addcdiv": lambda h, g: torch.addcdiv(h, g, g.abs() + 1, value=0.5),
    "distance": lambda h, g: h * torch.cdist(h.unsqueeze(1), g.unsqueeze(1)).squeeze(1),
    "similarity": lambda h, g: g + (h * g).sum(1, keepdim=True),
}
BESIDE_EITHER = {
    "divided by other units": lambda h, g: (h / g).nan_to_num(1.0).clamp(-9, 9),
    "power of units": lambda h, g: h.abs() ** g.abs(),
    "logarithm times": lambda h, g: torch.xlogy(h, g.abs()).clamp(-9, 9),
    "cosine similarity": lambda h, g: g + F.cosine_similarity(h, g, 1).unsqueeze(1),
    "units by index of their order": lambda h, g: g.gather(1, h.argsort(1)),
}
for name, function in ZEROS.items():
    accepts(name, between(function))
for name, function in POLES.items():
    either(name, between(function))
for name, function in BESIDE_ACCEPTED.items():
    accepts(name, beside(function))
for name, function in BESIDE_EITHER.items():
    either(name, beside(function))
accepts("where, of two branches", abc(lambda s, x: s.c(torch.where(s.d(x) > 0, s.a(x), s.b(x))), d=L(6, 4)))
either("random units", between(lambda h: h + torch.bernoulli(h.sigmoid())), varies=True)
either("random choice by units", between(lambda h: h + F.gumbel_softmax(h, dim=1)), varies=True)
accepts("input beside units as features", ac(lambda s, x: torch.cat([x[:, :2], torch.tanh(s.c(s.a(x)))], 1)))
accepts("features that are one where units are zero", ac(lambda s, x: s.c(torch.tanh(s.a(x))).exp()))
accepts("softmax as features", ac(lambda s, x: s.c(torch.tanh(s.a(x))).softmax(1)))
accepts("signs as features", ac(lambda s, x: torch.copysign(torch.ones(3), s.c(torch.tanh(s.a(x))))))
either("parameter in a plain list", ac(lambda s, x: s.c(s.a(x)) + s.list[0], list=lambda: [P(3)()]))

# Integers, booleans and constants used as values ----------------------------------------------------------------------

POSITIONS = torch.arange(4)

CONSTANTS = {
    "positions beside units": lambda h: torch.cat([POSITIONS.expand_as(h).to(h), h], 1)[:, 2:6],
    "positions beside units, as they are": lambda h: torch.cat([torch.arange(4).expand(h.shape[0], 4), h], 1)[:, :4],
    "integer positions added": lambda h: h + torch.arange(4),
    "integer positions multiplied": lambda h: h * POSITIONS + POSITIONS,
    "integer positions expanded": lambda h: (POSITIONS.expand_as(h) + 1) * h + POSITIONS.expand_as(h),
    "filled like": lambda h: torch.full_like(h, 2) + torch.full_like(h, 3, dtype=torch.long),
    "zeros like, in integers": lambda h: torch.zeros_like(h, dtype=torch.long) + 1.0,
    "ones like the first units": lambda h: torch.cat([torch.ones_like(h[:, :2]), h[:, 2:]], 1),
    "new tensors": lambda h: torch.cat([h.new_ones(h.shape[0], 2), h.new_full((h.shape[0], 2), 3)], 1),
    "where with integers": lambda h: torch.where(h > 0, POSITIONS, 2).to(h),
    "where with booleans": lambda h: torch.where(POSITIONS > 1, h, POSITIONS),
    "one-hot rows": lambda h: h @ F.one_hot(torch.tensor([1, 0, 3, 3]), 4).to(h) + F.one_hot(POSITIONS, 4)[1],
    "boolean mask of units": lambda h: h * (POSITIONS % 2 == 0) + (POSITIONS % 2 == 1),
    "masked select by a constant": lambda h: h[:, POSITIONS != 1].repeat(1, 2)[:, :4] + 1,
    "scatter": lambda h: torch.zeros_like(h).scatter(1, torch.tensor([[3, 2, 1, 0]]).expand(h.shape[0], 4), h) + 1,
    "scatter of ones": lambda h: h.scatter(1, torch.zeros(h.shape[0], 1, dtype=torch.long), 1.0),
    "scatter added": lambda h: h.scatter_add(1, torch.tensor([[0, 0, 1, 1]]).expand(h.shape[0], 4), h),
    "gather": lambda h: h.gather(1, torch.tensor([[3, 3, 0, 1]]).expand(h.shape[0], 4)) + 1,
    "take along": lambda h: torch.take_along_dim(h, torch.tensor([[3, 3, 0, 1]]), 1) + 1,
    "index_add": lambda h: h.index_add(1, torch.tensor([0, 0, 3]), h[:, 1:]),
    "index_put": lambda h: h.index_put((torch.arange(h.shape[0])[:, None], torch.tensor([0, 2])), torch.tensor(7.0)),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([2, 3]), h[:, :2]),
    "index_fill": lambda h: h.index_fill(1, torch.tensor([1]), 5.0),
    "cumsum": lambda h: h.cumsum(1),
    "sort": lambda h: h.sort(1).values,
    "order as a value": lambda h: h.argsort(1).to(h),
    "largest": lambda h: h.topk(4, 1).values,
    "places of the largest": lambda h: h.topk(4, 1).indices.to(h),
    "arg max as a value": lambda h: h.argmax(1, keepdim=True) * torch.ones(4),
    "one-hot arg max": lambda h: F.one_hot(h.argmax(1), 4).to(h),
    "range by a product": lambda h: h + torch.outer(torch.ones(h.shape[0]), POSITIONS.to(h)),
    "triangular": lambda h: h @ torch.ones(4, 4).tril() + torch.eye(4)[0],
    "integer division": lambda h: (h * 4).long().to(h) + 1,
    "threshold": lambda h: F.threshold(h, 0.1, 5.0),
    "padded with threes": lambda h: F.pad(h[:, 1:3], (1, 1), value=3.0),
    "filled where it is zero": lambda h: h.masked_fill(h == 0, 3.0),
    "numbers of units looked up": lambda h: torch.tensor([0.0, 1.0, 2.0, 3.0])[POSITIONS.flip(0)] + h,
}
# torch.export takes the batch size for a constant in the first, and an entry count for an unknown in the second.
NOT_EXPORTED = {"take along", "masked select by a constant"}
for name, function in CONSTANTS.items():
    (either if name in NOT_EXPORTED else accepts)(name, between(function))


def padding_mask(s, x):
    seen = (x != 0).unsqueeze(-1)
    return s.c((s.e(x) * seen).sum(1) / seen.sum(1).clamp(min=1))


def buffer_beside(s, x):
    return s.c(torch.cat([s.a(x), s.n.expand(x.shape[0], 2)], 1)[:, 2:])


accepts("integer buffer added", ac(lambda s, x: s.c(s.a(x) + s.n), n=K([3, 2, 1, 0])))
accepts("integer buffer as an index", ac(lambda s, x: s.c(s.a(x)[:, s.n] + s.n), n=K([3, 2, 2, 0])))
accepts("integer buffer multiplied", ac(buffer_beside, n=K([0, 1])))
either("embedding of an arg max", ac(lambda s, x: s.c(s.e(s.a(x).argmax(1))), e=E(4)))
either("embedding of rounded units", ac(lambda s, x: s.c(s.e((s.a(x) * 3).long().clamp(0, 3)).sum(1)), e=E(4)))
either("embedding of a constant", ac(lambda s, x: s.c(s.a(x) + s.e(torch.tensor([0, 2])).sum(0)), e=E(4)))
either("rows of a parameter by arg max", ac(lambda s, x: s.c(s.a(x) + s.g[s.a(x).argmax(1)]), g=P(4, 4)))
accepts("words and places", ec(lambda s, x: s.c(torch.tanh(s.e(x) + s.p(torch.arange(3)))).mean(1), p=E(3)), WORDS)
accepts("padding mask from the words", ec(padding_mask), WORDS)
accepts("units gathered by data", ac(lambda s, x: s.c(torch.gather(s.a(x), 1, (x[:, :4] > 0).long()))))
accepts("length of the units", ac(lambda s, x: s.c(s.a(x).tanh().transpose(1, 2).norm(2, 1)), c=L(3, 3)), TOKENS)

# Samples and units that change places ---------------------------------------------------------------------------------

SAMPLES = {
    "rolled over samples": lambda h: h + h.roll(1, 0),
    "rolled over all": lambda h: h + h.roll(1),
    "samples turned round": lambda h: h + h.flip(0),
    "mean over samples": lambda h: h - h.mean(0),
    "first sample for all": lambda h: h + h[0],
    "last sample for all": lambda h: h + h[-1:],
    "softmax over samples": lambda h: h.softmax(0),
    "cumsum over samples": lambda h: h.cumsum(0),
    "sorted samples": lambda h: h.sort(0).values,
    "samples compared": lambda h: (h @ h.T).softmax(1) @ h,
    "covariance": lambda h: h @ (h.T @ h),
    "every other sample twice": lambda h: h + h[::2].repeat_interleave(2, 0)[: h.shape[0]],
    "largest over everything": lambda h: h + h.max(),
    "times the number of samples": lambda h: h * len(h) + h.shape[0],
    "transposed in memory": lambda h: h.T.contiguous().view(-1, 4) + h,
    "transposed twice": lambda h: h.T.contiguous().T,
}
UNITS = {  # name → (function, number of units that it returns)
    "repeated units": (lambda h: h.repeat(1, 2) + 1, 8),
    "units repeated one by one": (lambda h: h.repeat_interleave(2, 1) + 1, 8),
    "tiled units": (lambda h: torch.tile(h, (1, 2)) + 1, 8),
    "pooled over units": (lambda h: F.avg_pool1d(torch.tanh(h).unsqueeze(1), 2, 1).flatten(1) + 1, 3),
    "largest of neighbours": (lambda h: F.max_pool1d(h.unsqueeze(1), 2, 1).flatten(1), 3),
    "upsampled": (lambda h: F.interpolate(h.tanh()[:, None], scale_factor=2, mode="linear").flatten(1) + 1, 8),
    "maxout": (lambda h: h.view(-1, 2, 2).amax(2), 2),
    "spectrum over units": (lambda h: torch.fft.rfft(h).abs(), 3),
    "flipped and added": (lambda h: h + h.flip(1), 4),
    "rolled units": (lambda h: h.roll(1, 1) + 1, 4),
}
MAPS = {
    "pixel shuffle": (lambda h: F.pixel_shuffle(h, 2), 16),
    "pixel unshuffle": (lambda h: F.pixel_unshuffle(h, 2), 16),
    "channel shuffle": (lambda h: F.channel_shuffle(h, 2).mean((2, 3)), 4),
    "unfolded patches": (lambda h: F.unfold(h, 2), 16),
    "windows": (lambda h: h.unfold(2, 2, 1), 16),
    "axes permuted": (lambda h: h.permute(0, 2, 3, 1).reshape(h.shape[0], 4, 4).sum(1), 4),
    "axes permuted wrongly": (lambda h: h.permute(0, 2, 3, 1).reshape(h.shape[0], 4, 4).sum(2), 4),
}


def folded(s, x):
    return s.c(torch.tanh(s.d(torch.tanh(s.a(x)).view(-1, 2))).view(-1, 4))


def folded_by_shape(s, x):
    return s.c(torch.tanh(s.d(torch.tanh(s.a(x)).reshape(x.shape[0] * 2, 2))).reshape(x.shape[0], 4))


def folded_channels(s, x):
    return s.c(torch.tanh(s.d(torch.tanh(s.a(x)).view(x.shape[0], 2, 2))).flatten(1))


def folded_positions(s, x):
    return s.c(torch.tanh(s.a(x.flatten(0, 1))).view(x.shape[0], 3, 4).mean(1))


for name, function in SAMPLES.items():
    either(name, between(function))
for name, (function, width) in UNITS.items():
    accepts(name, between(function, c=L(width, 3)))
for name, (function, width) in MAPS.items():
    accepts(name, maps(function, width), IMAGE)
either("samples drawn and mixed", between(lambda h: h + h[torch.randperm(h.shape[0])]), varies=True)
either("units folded into samples", acd(folded, d=L(2, 2)))
either("units folded into samples by shape", acd(folded_by_shape, d=L(2, 2)))
accepts("positions folded into samples", ac(folded_positions), TOKENS)
accepts("channels folded into positions", acd(folded_channels, d=L(2, 2)))
accepts("outer product", beside(lambda h, g: (h[:, :, None] + g[:, None]).flatten(1), c=L(16, 3)))

# Control flow ---------------------------------------------------------------------------------------------------------


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
    return s.c(h) if s.training and random.random() < 0.5 else s.c(h + torch.tanh(s.d(h)))


CONTROL_FLOW_ON_VALUES = ("control flow on the data", "control flow on a unit", "control flow on a parameter")
either("control flow on the data", ac(lambda s, x: s.c(s.a(x)) if x.sum() > 0 else s.c(-s.a(x))))
either("control flow on a unit", ac(on_a_unit))
either("control flow on a parameter", ac(lambda s, x: s.c(s.a(x)) if s.a.weight[0, 0] > 0 else s.c(-s.a(x))))
either("control flow on the number of samples", ac(lambda s, x: s.c(s.a(x)) if x.shape[0] > 3 else s.c(s.a(x) + 1)))
either("control flow on odd batches", abc(lambda s, x: s.c(s.a(x)) if len(x) % 2 else s.c(s.a(x) + s.b(x))))
either("a number from the data", ac(lambda s, x: s.c(s.a(x) * x.abs().max().item())))
either("loop until small", ac(until_small))
either("random path", abc(lambda s, x: s.c(s.a(x)) if random.random() < 0.5 else s.c(s.a(x) + s.b(x))), varies=True)
either("layers dropped at random", acd(layers_dropped), varies=True)
accepts("noise in training", ac(lambda s, x: s.c(s.a(x) + (torch.randn(4) if s.training else 0))), varies=True)
accepts("another path in training", abc(lambda s, x: s.c(s.a(x) if s.training else s.a(x) + s.b(x))))
accepts("another activation in training", ac(lambda s, x: s.c(F.rrelu(s.a(x), training=s.training) + 1)), varies=True)
