"""Samples and units that change places."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F

from support.leaking_networks.kit import IMAGE, TOKENS, C, L, accepts, between, either, kc, net


def folded(s, x):
    return s.c(torch.tanh(s.d(torch.tanh(s.a(x)).view(-1, 2))).view(-1, 4))


def folded_by_shape(s, x):
    return s.c(torch.tanh(s.d(torch.tanh(s.a(x)).reshape(x.shape[0] * 2, 2))).reshape(x.shape[0], 4))


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
for name, function in SAMPLES.items():
    either(name, between(function))
either("samples drawn and mixed", between(lambda h: h + h[torch.randperm(h.shape[0])]), varies=True)
either("units folded into samples", net(folded, a=L(6, 4), d=L(2, 2), c=L(4, 3)))
either("units folded into samples by shape", net(folded_by_shape, a=L(6, 4), d=L(2, 2), c=L(4, 3)))
accepts(
    "positions folded into samples",
    net(lambda s, x: s.c(torch.tanh(s.a(x.flatten(0, 1))).view(x.shape[0], 3, 4).mean(1)), a=L(6, 4), c=L(4, 3)),
    TOKENS,
)
accepts(
    "channels folded into positions",
    net(
        lambda s, x: s.c(torch.tanh(s.d(torch.tanh(s.a(x)).view(x.shape[0], 2, 2))).flatten(1)),
        a=L(6, 4),
        d=L(2, 2),
        c=L(4, 3),
    ),
)
accepts(
    "axes permuted",
    kc(lambda s, x: s.c(torch.tanh(s.k(x)).permute(0, 2, 3, 1).reshape(x.shape[0], 4, 4).sum(1))),
    IMAGE,
)
accepts(
    "axes permuted wrongly",
    kc(lambda s, x: s.c(torch.tanh(s.k(x)).permute(0, 2, 3, 1).reshape(x.shape[0], 4, 4).sum(2))),
    IMAGE,
)
accepts(
    "pixel shuffle",
    net(lambda s, x: s.c(F.pixel_shuffle(torch.tanh(s.k(x)), 2).flatten(1) + 1), k=C(2, 4, 3), c=L(16, 3)),
    IMAGE,
)
accepts(
    "pixel unshuffle",
    net(lambda s, x: s.c(F.pixel_unshuffle(torch.tanh(s.k(x)), 2).flatten(1) + 1), k=C(2, 4, 3), c=L(16, 3)),
    IMAGE,
)
accepts("channel shuffle", kc(lambda s, x: s.c(F.channel_shuffle(torch.tanh(s.k(x)), 2).mean((2, 3)) + 1)), IMAGE)
accepts(
    "unfolded patches",
    net(lambda s, x: s.c(F.unfold(torch.tanh(s.k(x)), 2).flatten(1) + 1), k=C(2, 4, 3), c=L(16, 3)),
    IMAGE,
)
accepts(
    "windows", net(lambda s, x: s.c(torch.tanh(s.k(x)).unfold(2, 2, 1).flatten(1) + 1), k=C(2, 4, 3), c=L(16, 3)), IMAGE
)
accepts("repeated units", net(lambda s, x: s.c(s.a(x).repeat(1, 2) + 1), a=L(6, 4), c=L(8, 3)))
accepts("units repeated one by one", net(lambda s, x: s.c(s.a(x).repeat_interleave(2, 1) + 1), a=L(6, 4), c=L(8, 3)))
accepts("tiled units", net(lambda s, x: s.c(torch.tile(s.a(x), (1, 2)) + 1), a=L(6, 4), c=L(8, 3)))
accepts(
    "outer product",
    net(lambda s, x: s.c((s.a(x)[:, :, None] + s.b(x)[:, None]).flatten(1)), a=L(6, 4), b=L(6, 4), c=L(16, 3)),
)
accepts(
    "upsampled",
    net(
        lambda s, x: s.c(F.interpolate(torch.tanh(s.a(x)).unsqueeze(1), scale_factor=2, mode="linear").flatten(1) + 1),
        a=L(6, 4),
        c=L(8, 3),
    ),
)
accepts(
    "pooled over units",
    net(lambda s, x: s.c(F.avg_pool1d(torch.tanh(s.a(x)).unsqueeze(1), 2, 1).flatten(1) + 1), a=L(6, 4), c=L(3, 3)),
)
accepts(
    "largest of neighbours",
    net(lambda s, x: s.c(F.max_pool1d(s.a(x).unsqueeze(1), 2, 1).flatten(1)), a=L(6, 4), c=L(3, 3)),
)
accepts("maxout", net(lambda s, x: s.c(s.a(x).view(-1, 2, 2).amax(2)), a=L(6, 4), c=L(2, 3)))
accepts("spectrum over units", net(lambda s, x: s.c(torch.fft.rfft(s.a(x)).abs()), a=L(6, 4), c=L(3, 3)))
accepts("flipped and added", between(lambda h: h + h.flip(1)))
accepts("rolled units", between(lambda h: h.roll(1, 1) + 1))
