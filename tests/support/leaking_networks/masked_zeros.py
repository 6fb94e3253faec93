"""Arithmetic that tells a masked zero from nothing."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F

from support.leaking_networks.kit import L, P, abc, ac, accepts, beside, between, either, net

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
}
for name, function in ZEROS.items():
    accepts(name, between(function))
for name, function in POLES.items():
    either(name, between(function))

accepts("divided by other units plus one", beside(lambda h, g: h / (g.abs() + 1)))
either("divided by other units", beside(lambda h, g: (h / g).nan_to_num(1.0).clamp(-9, 9)))
accepts(
    "where, of two branches",
    net(lambda s, x: s.c(torch.where(s.d(x) > 0, s.a(x), s.b(x))), a=L(6, 4), b=L(6, 4), d=L(6, 4), c=L(4, 3)),
)
accepts("where, as a gate of itself", beside(lambda h, g: torch.where(h > 0, h, g)))
accepts("larger of two", beside(torch.maximum))
accepts("compared", beside(lambda h, g: (h > g).float() + (h == g).float()))
accepts("lerp", beside(lambda h, g: torch.lerp(h, g, 0.3)))
accepts("sums of squares", beside(lambda h, g: torch.hypot(h, g)))
either("power of units", beside(lambda h, g: h.abs() ** g.abs()))
either("logarithm times", beside(lambda h, g: torch.xlogy(h, g.abs()).clamp(-9, 9)))
accepts("addcdiv", beside(lambda h, g: torch.addcdiv(h, g, g.abs() + 1, value=0.5)))
accepts("distance", abc(lambda s, x: s.c(s.a(x) * torch.cdist(s.a(x).unsqueeze(1), s.b(x).unsqueeze(1)).squeeze(1))))
accepts("similarity", abc(lambda s, x: s.c(s.b(x) + (s.a(x) * s.b(x)).sum(1, keepdim=True))))
either("cosine similarity", abc(lambda s, x: s.c(s.b(x) + F.cosine_similarity(s.a(x), s.b(x), 1).unsqueeze(1))))
either("boolean indexing", between(lambda h: h + h[h > 0].sum()))
either("non-zero units", between(lambda h: h + torch.nonzero(h).sum()))
either("different values", between(lambda h: h + torch.unique(h).numel()))
either("units by index of their order", abc(lambda s, x: s.c(s.b(x).gather(1, s.a(x).argsort(1)))))
either("random units", between(lambda h: h + torch.bernoulli(h.sigmoid())), varies=True)
either("random choice by units", between(lambda h: h + F.gumbel_softmax(h, dim=1)), varies=True)


accepts("input beside units as features", ac(lambda s, x: torch.cat([x[:, :2], torch.tanh(s.c(s.a(x)))], 1)))
accepts("features that are one where units are zero", ac(lambda s, x: s.c(torch.tanh(s.a(x))).exp()))
accepts("softmax as features", ac(lambda s, x: s.c(torch.tanh(s.a(x))).softmax(1)))
accepts("signs as features", ac(lambda s, x: torch.copysign(torch.ones(3), s.c(torch.tanh(s.a(x))))))
either("parameter in a plain list", ac(lambda s, x: s.c(s.a(x)) + s.list[0], list=lambda: [P(3)()]))
