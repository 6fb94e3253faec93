"""State: writes in place through shared memory, buffers and norms, modules whose forward is not that of their class."""

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.leaking_networks.kit import IMAGE, K, abc, ac, accepts, between, either, kc, part, wc
from support.leaking_networks.layers import NORM, after_units
from support.small_networks import P

# Writes in place, through tensors that share memory -------------------------------------------------------------------

ALIASES = {
    "diagonal": lambda h: h.view(-1, 2, 2).diagonal(0, 1, 2),
    "split": lambda h: h.split([1, 3], 1)[1].detach(),
    "chunk": lambda h: h.chunk(2, 1)[0].detach(),
    "detach": lambda h: h.detach(),
    "view": lambda h: h.view(-1),
    "expand": lambda h: h.expand(h.shape[0], 4),
    "type_as": lambda h: h.type_as(h),
    "meshgrid": lambda h: torch.meshgrid(h.view(-1), h.new_ones(1), indexing="ij")[0],
}
# Aliases that use another part of torch than a tensor's own memory may be refused.
ODD = {"meshgrid", "detach"}


def writes(function):
    """A network that computes units, calls a function that writes into them, and reads them."""
    return between(lambda h: (function(h), h)[1])


for name, alias in ALIASES.items():
    (either if name in ODD else accepts)(f"written through {name}", writes(lambda h, alias=alias: alias(h).add_(1)))


def through_a_cousin(h):
    parts, turned = h.detach().chunk(2, 1), h.detach().unflatten(1, (2, 2)).transpose(1, 2)
    turned.mul_(2).add_(1)
    return torch.cat([parts[1], parts[0]], 1)


def later_than_read(h):
    g = h * 2
    h.relu_().add_(1)
    return g + h


def only_through_views(h):
    for number, row in enumerate(h.detach().unbind(1)):
        row.detach().add_(number)
    return h


def into_a_buffer_of_zeros(h):
    out = torch.zeros(h.shape[0], 4)
    out[:, 1:3] = h[:, :2]
    out[:, :1] += 1
    return out


def list_of_views_summed(h):
    first, second = h[:, :2], h[:, 2:]
    first += second
    second -= 1
    return h


def slice_of_a_copy(h):
    g = h.clone()
    g[:, 0].add_(1)
    return h + g


RETURN = {  # functions that write, and return what is read
    "a cousin view": through_a_cousin,
    "itself, after it was read": later_than_read,
    "each column": only_through_views,
    "a tensor of zeros": into_a_buffer_of_zeros,
    "one half from the other": list_of_views_summed,
    "a slice of a copy": slice_of_a_copy,
    "zero_": lambda h: (h[:, :2].zero_(), h.add_(1))[1],
    "resize by hand": lambda h: (h.t_(), h.t())[1],
}
WRITE = {  # functions after which the units themselves are read
    "half of it filled": lambda h: h.narrow(1, 0, 2).fill_(3.0),
    "addcmul_": lambda h: h.addcmul_(torch.ones(4), torch.ones(4), value=2),
    "cumsum_": lambda h: h.cumsum_(1),
    "out= of a slice": lambda h: torch.exp(h.detach()[:, 2:], out=h.detach()[:, 2:]),
}
MAY_FAIL = {"each column", "resize by hand", "out= of a slice"}
IN_PLACE = {name: between(function) for name, function in RETURN.items()}
IN_PLACE |= {name: writes(function) for name, function in WRITE.items()}
for name, factory in IN_PLACE.items():
    (either if name in MAY_FAIL else accepts)(f"writes in place: {name}", factory)


def read_elsewhere(kind, *args, **options):
    return ac(lambda s, x: (h := s.a(x), s.d(h), s.c(h))[2], d=part(kind, *args, **options))


for kind in (nn.Hardsigmoid, nn.ELU, nn.Hardtanh, nn.SiLU):
    accepts(f"writes in place: {kind.__name__}, read elsewhere", read_elsewhere(kind, inplace=True))
WRITTEN = ac(lambda s, x: (h := s.a(x), s.d(h).add_(1), s.c(h))[2], d=part(nn.Dropout, 0.0))
accepts("written through Dropout", WRITTEN)
either("writes into the input", ac(lambda s, x: (x.add_(1), s.c(s.a(x)))[1]))
accepts("AlphaDropout", ac(lambda s, x: s.c(s.d(s.a(x))), d=part(nn.AlphaDropout, 0.5)), varies=True)
either("FeatureAlphaDropout, read elsewhere", read_elsewhere(nn.FeatureAlphaDropout, 0.5, True), varies=True)

# Functions that torch.export may take as a whole ----------------------------------------------------------------------


@torch.fx.wrap
def add_one_in_place(h):
    h.add_(1)
    return h


class MixesUnits(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx, h):
        return h.cumsum(1) + 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(1).cumsum(1).flip(1)


@torch.library.custom_op("leaking_networks::add_one", mutates_args={"h"})
def add_one(h: torch.Tensor) -> None:
    h.add_(1)


@torch.library.custom_op("leaking_networks::layer", mutates_args=())
def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ (weight - weight.mean(0)).T


layer.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))


def checkpointed(s, x):
    return s.c(checkpoint(lambda y: torch.tanh(s.a(y)).cumsum(1) + s.b(y), x, use_reentrant=False))


def no_gradient(s, x):
    with torch.no_grad():
        h = torch.tanh(s.a(x)) + 1
    return s.c(h)


def lower_precision(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.tanh(s.a(x)) + 1
    return s.c(h.float())


either("wrapped function that writes in place", writes(add_one_in_place))
either("function with its own gradient", between(MixesUnits.apply))
either("operation of one's own that writes in place", writes(add_one))
either("operation of one's own on a weight", wc(lambda s, x: s.c(layer(x, s.w))))
accepts("checkpointed block", abc(checkpointed))
either("function mapped over samples", between(torch.vmap(lambda h: h.cumsum(0) + 1)))
ON_THE_DEVICE = ac(lambda s, x: s.c(torch.cond(x.sum() > 0, lambda h: h + 1, lambda h: h - 1, (s.a(x),))))
either("branch chosen on the device", ON_THE_DEVICE)
either("layer without gradient", ac(no_gradient))
either("layer in lower precision", ac(lower_precision))

# Buffers and attributes that a forward changes, norms written by hand -------------------------------------------------


def moving_average(s, x):
    h = s.a(x)
    if s.training:
        s.n.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return s.c(h - s.n)


def attribute_replaced(s, x):
    h = s.a(x)
    before = getattr(s, "last", None)
    s.last = h.detach().mean(0)
    return s.c(h if before is None else h - before)


def by_hand(s, x):
    h = s.a(x)
    return s.c(s.g * (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt() + s.b)


def groups_by_hand(s, x):
    h = s.k(x)
    g = h.view(h.shape[0] * 2, -1)
    g = (g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-5)
    return s.c(g.view_as(h).mean((2, 3)) + h.amax((2, 3)))


def images(norm, *args, **options):
    return kc(lambda s, x: s.c(torch.tanh(s.n(s.k(x))).mean((2, 3))), n=part(norm, *args, **options))


either("moving average of units", ac(moving_average, n=K(torch.zeros(4))))
either("attribute replaced", ac(attribute_replaced))
either("batch statistics by hand", ac(by_hand, g=P(4), b=P(4)))
LEARNED = ac(lambda s, x: s.c(F.batch_norm(s.a(x), s.n.detach(), s.v.detach().abs() + 1)), n=P(4), v=P(4))
either("F.batch_norm with learned statistics", LEARNED)
accepts("batch norm without momentum", images(nn.BatchNorm2d, 4, momentum=None), IMAGE)
accepts("batch norm without statistics", images(nn.BatchNorm2d, 4, track_running_stats=False), IMAGE)
accepts("batch norm of the batch", images(nn.BatchNorm2d, 4), IMAGE, {"norm": "batch"})
accepts("instance norm with statistics", images(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), IMAGE)
accepts("local response norm", images(nn.LocalResponseNorm, 2), IMAGE)
accepts("rms norm by hand", between(lambda h: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)))
accepts("groups by hand", kc(groups_by_hand), IMAGE)
either("norm with its weight read elsewhere", ac(lambda s, x: s.c(s.n(s.a(x)) + s.n.weight), n=NORM))
either("norm with its statistics read elsewhere", ac(lambda s, x: s.c(s.n(s.a(x)) + s.n.running_mean), n=NORM))
either("norm that others write to", ac(lambda s, x: (y := s.n(s.a(x)), s.n.running_mean.add_(1), s.c(y))[2], n=NORM))

# Modules whose forward is not that of their class ---------------------------------------------------------------------


def patched(layer, forward, **parts):
    """Return a layer with further parts, and its forward replaced from outside."""
    for name, value in parts.items():
        setattr(layer, name, value)
    layer.forward = lambda x: forward(layer, x)
    return layer


def patched_lora():
    parts = {"A": P(2, 4)(), "B": P(4, 2)()}
    return patched(nn.Linear(4, 4), lambda s, x: F.linear(x, s.weight + s.B @ s.A, s.bias), **parts)


accepts("LoRA by a patched forward", after_units(patched_lora))


def shifting_relu():
    relu = type("ReLU", (nn.ReLU,), {"forward": lambda s, x: F.relu(x).roll(1, 1)})
    return nn.Sequential(nn.Linear(6, 4), relu(), nn.Linear(4, 3))


accepts("ReLU that shifts its units", shifting_relu)


def mode_that_is_set(s, x):
    s.n.eval()
    return s.c(s.n(s.a(x)))


accepts("mode set by the forward", ac(mode_that_is_set, n=part(nn.BatchNorm1d, 4, affine=False)))


def hooked():
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    net[1].register_forward_hook(lambda module, args, out: out.cumsum(1))
    return net


either("forward hook that mixes units", hooked)
