"""Networks whose forward keeps something, and norms written by hand."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn

from support.leaking_networks.functions_and_attention import tokens
from support.leaking_networks.kit import IMAGE, TOKENS, K, L, P, abc, ac, accepts, between, either, kc, net, part
from support.leaking_networks.shared_modules import NORM


def counted(s, x):
    s.n += 1
    return s.c(s.a(x) * s.n)


def moving_average(s, x):
    h = s.a(x)
    if s.training:
        s.n.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return s.c(h - s.n)


def buffer_replaced(s, x):
    h = s.a(x)
    s.n = 0.9 * s.n + 0.1 * h.detach().mean(0)
    return s.c(h - s.n)


def attribute_replaced(s, x):
    h = s.a(x)
    before = getattr(s, "last", None)
    s.last = h.detach().mean(0)
    return s.c(h if before is None else h - before)


def number_counted(s, x):
    s.calls = getattr(s, "calls", 0) + 1
    return s.c(s.a(x) * s.calls)


def by_hand(s, x):
    h = s.a(x)
    return s.c(s.g * (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt() + s.b)


def rms_by_hand(h):
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


def groups_by_hand(s, x):
    h = s.k(x)
    g = h.view(h.shape[0] * 2, -1)
    g = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-5)
    return s.c(g.view_as(h).mean((2, 3)) + h.amax((2, 3)))


def images(norm, *args, **options):
    return kc(lambda s, x: s.c(torch.tanh(s.n(s.k(x))).mean((2, 3))), n=part(norm, *args, **options))


either("buffer counted up", ac(counted, n=K(torch.ones(4))))
either("moving average of units", ac(moving_average, n=K(torch.zeros(4))))
either("buffer replaced", ac(buffer_replaced, n=K(torch.zeros(4))))
either("attribute replaced", ac(attribute_replaced))
either("calls counted", ac(number_counted), varies=True)
either("batch statistics by hand", net(by_hand, a=L(6, 4), c=L(4, 3), g=P(4), b=P(4)))
either(
    "F.batch_norm on own buffers",
    ac(lambda s, x: s.c(F.batch_norm(s.a(x), s.n, s.v, training=s.training)), n=K(torch.zeros(4)), v=K(torch.ones(4))),
)
either(
    "F.batch_norm with learned statistics",
    ac(lambda s, x: s.c(F.batch_norm(s.a(x), s.n.detach(), s.v.detach().abs() + 1)), n=P(4), v=P(4)),
)
either("F.layer_norm", ac(lambda s, x: s.c(F.layer_norm(s.a(x), (4,), s.g, s.v)), g=P(4), v=P(4)))
either("F.group_norm over unit groups", ac(lambda s, x: s.c(F.group_norm(s.a(x), 2, s.g)), g=P(4)))
accepts("batch norm without momentum", images(nn.BatchNorm2d, 4, momentum=None), IMAGE)
accepts("batch norm without statistics", images(nn.BatchNorm2d, 4, track_running_stats=False), IMAGE)
accepts("batch norm without parameters", images(nn.BatchNorm2d, 4, affine=False), IMAGE)
accepts("batch norm of the batch", images(nn.BatchNorm2d, 4), IMAGE, {"norm": "batch"})
accepts("instance norm with statistics", images(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), IMAGE)
either("synchronised batch norm", images(nn.SyncBatchNorm, 4), IMAGE)
accepts("group norm", images(nn.GroupNorm, 2, 4), IMAGE)
accepts("layer norm over maps", images(nn.LayerNorm, (4, 2, 2)), IMAGE)
accepts("layer norm over two axes", tokens(lambda s, x: s.c(s.n(s.a(x)).mean(1)), n=part(nn.LayerNorm, (3, 4))), TOKENS)
accepts("local response norm", images(nn.LocalResponseNorm, 2), IMAGE)
accepts("rms norm", ac(lambda s, x: s.c(s.n(s.a(x))), n=part(nn.RMSNorm, 4)))
accepts("rms norm by hand", between(rms_by_hand))
accepts("rms norm by hand with a weight", ac(lambda s, x: s.c(rms_by_hand(s.a(x)) * s.g), g=P(4)))
accepts("layer norm by hand", between(lambda h: (h - h.mean(1, True)) / (h.var(1, keepdim=True) + 1e-5).sqrt()))
accepts("groups by hand", kc(groups_by_hand), IMAGE)
either("norm with its weight read elsewhere", ac(lambda s, x: s.c(s.n(s.a(x)) + s.n.weight), n=NORM))
either("norm with its statistics read elsewhere", ac(lambda s, x: s.c(s.n(s.a(x)) + s.n.running_mean), n=NORM))
either("norm over a sum of branches", abc(lambda s, x: s.c(s.n(s.a(x) + s.b(x).cumsum(1))), n=NORM))
either("norm that others write to", ac(lambda s, x: (y := s.n(s.a(x)), s.n.running_mean.add_(1), s.c(y))[2], n=NORM))
