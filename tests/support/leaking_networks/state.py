"""State: writes in place through shared memory, buffers and norms, modules whose forward is not that of their class."""

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.leaking_networks.functions import POSITIONS
from support.leaking_networks.kit import (
    IMAGE,
    TOKENS,
    K,
    L,
    P,
    abc,
    ac,
    accepts,
    between,
    either,
    kc,
    net,
    part,
    wc,
)
from support.leaking_networks.layers import NORM, after_units, standard

# Writes in place, through tensors that share memory -------------------------------------------------------------------

ALIASES = {
    "real": lambda h: h.real,
    "ravel": lambda h: h.ravel(),
    "diagonal": lambda h: h.view(-1, 2, 2).diagonal(0, 1, 2),
    "hsplit": lambda h: h.hsplit(2)[1],
    "tensor_split": lambda h: h.tensor_split(2, 1)[0],
    "split": lambda h: h.split([1, 3], 1)[1].detach(),
    "unfold": lambda h: h.unfold(1, 2, 2),
    "narrow": lambda h: h.narrow(1, 1, 2),
    "select": lambda h: h.select(1, 2),
    "squeeze": lambda h: h.unsqueeze(2).squeeze(2),
    "chunk": lambda h: h.chunk(2, 1)[0].detach(),
    "unbind": lambda h: h.unbind(1)[3].detach(),
    "T": lambda h: h.T,
    "mT": lambda h: h.mT,
    "swapaxes": lambda h: h.swapaxes(0, 1),
    "movedim": lambda h: h.movedim(0, 1),
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "contiguous": lambda h: h.contiguous(),
    "reshape": lambda h: h.reshape(h.shape[0], 4),
    "view": lambda h: h.view(-1),
    "view_as": lambda h: h.view_as(h),
    "flatten": lambda h: h.flatten(1),
    "unflatten": lambda h: h.unflatten(1, (2, 2)),
    "expand": lambda h: h.expand(h.shape[0], 4),
    "expand_as": lambda h: h.expand_as(h),
    "an index": lambda h: h[:, 1:3],
    "all dimensions": lambda h: h[...],
    "to": lambda h: h.to(torch.float32),
    "float": lambda h: h.float(),
    "type_as": lambda h: h.type_as(h),
    "positive": lambda h: h.positive(),
    "atleast_3d": lambda h: torch.atleast_3d(h),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, torch.ones(4))[0],
    "broadcast_to": lambda h: torch.broadcast_to(h, h.shape),
    "as_strided": lambda h: h.as_strided((h.shape[0], 2), (4, 1)),
    "view of another type": lambda h: h.view(torch.int32),
    "dropout that does nothing": lambda h: F.dropout(h, 0.5, False),
    "meshgrid": lambda h: torch.meshgrid(h.view(-1), h.new_ones(1), indexing="ij")[0],
}
# Aliases that use another part of torch than a tensor's own memory may be refused.
ODD = {"unbind", "unfold", "data", "as_strided", "view of another type", "meshgrid", "detach", "real"}


def writes(function):
    """A network that computes units, calls a function that writes into them, and reads them."""
    return between(lambda h: (function(h), h)[1])


for name, alias in ALIASES.items():
    (either if name in ODD else accepts)(f"written through {name}", writes(lambda h, alias=alias: alias(h).add_(1)))


def through_a_sibling(h):
    u, v = h.view(-1, 2, 2), h.view(-1, 4)
    u.add_(1)
    return v


def through_a_cousin(h):
    parts, turned = h.detach().chunk(2, 1), h.detach().unflatten(1, (2, 2)).transpose(1, 2)
    turned.mul_(2).add_(1)
    return torch.cat([parts[1], parts[0]], 1)


def through_the_real_part(h):
    z = torch.complex(h, h)
    torch.view_as_real(z).add_(1)
    return z.real


def with_imaginary_part(h):
    z = torch.complex(h, h)
    z.imag.add_(1)
    return z.abs()


def later_than_read(h):
    g = h * 2
    h.relu_().add_(1)
    return g + h


def only_through_views(h):
    for number, row in enumerate(h.detach().unbind(1)):
        row.detach().add_(number)
    return h


def slices_set(h):
    h[:, ::2] = 1.0
    return h


def units_copied(h):
    h[:, 0] = h[:, 1]
    h[:, 2:].copy_(h[:, :2])
    return h


def set_where(h):
    h[h == 0] = 5.0
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
    "a sibling view": through_a_sibling,
    "a cousin view": through_a_cousin,
    "view_as_real": through_the_real_part,
    "the imaginary part": with_imaginary_part,
    "itself, after it was read": later_than_read,
    "each column": only_through_views,
    "every other unit set": slices_set,
    "units copied onto others": units_copied,
    "where it is zero": set_where,
    "a tensor of zeros": into_a_buffer_of_zeros,
    "one half from the other": list_of_views_summed,
    "a slice of a copy": slice_of_a_copy,
    "zero_": lambda h: (h[:, :2].zero_(), h.add_(1))[1],
    "resize by hand": lambda h: (h.t_(), h.t())[1],
}
WRITE = {  # functions after which the units themselves are read
    "half of it filled": lambda h: h.narrow(1, 0, 2).fill_(3.0),
    "masked_fill_": lambda h: h.masked_fill_(h.detach() == 0, 3.0),
    "masked_fill_ of the input's mask": lambda h: h.masked_fill_(POSITIONS > 1, 3.0),
    "index_fill_": lambda h: h.index_fill_(1, torch.tensor([0, 2]), 7.0),
    "index_add_": lambda h: h.index_add_(1, torch.tensor([0, 2]), torch.ones(h.shape[0], 2)),
    "scatter_": lambda h: h.scatter_(1, torch.ones(h.shape[0], 1, dtype=torch.long), 7.0),
    "add_ with alpha": lambda h: h.add_(torch.ones(4), alpha=3),
    "addcmul_": lambda h: h.addcmul_(torch.ones(4), torch.ones(4), value=2),
    "lerp_": lambda h: h.lerp_(torch.ones(4), 0.5),
    "cumsum_": lambda h: h.cumsum_(1),
    "sigmoid_ of a slice": lambda h: h[:, 1:].sigmoid_(),
    "out=": lambda h: torch.add(h.detach(), 1, out=h.detach()),
    "out= of a slice": lambda h: torch.exp(h.detach()[:, 2:], out=h.detach()[:, 2:]),
    "threshold in place": lambda h: F.threshold(h, 0.1, 5.0, inplace=True),
    "hard sigmoid in place": lambda h: F.hardsigmoid(h, inplace=True),
    "iadd": lambda h: h.__iadd__(1),
    "foreach": lambda h: torch._foreach_add_([h[:, :2], h[:, 2:]], 1.0),
}
MAY_FAIL = {"each column", "view_as_real", "the imaginary part", "where it is zero", "resize by hand"}
MAY_FAIL |= {"out=", "out= of a slice", "foreach"}
IN_PLACE = {name: between(function) for name, function in RETURN.items()}
IN_PLACE |= {name: writes(function) for name, function in WRITE.items()}
for name, factory in IN_PLACE.items():
    (either if name in MAY_FAIL else accepts)(f"writes in place: {name}", factory)


def read_elsewhere(kind, *args, **options):
    return ac(lambda s, x: (h := s.a(x), s.d(h), s.c(h))[2], d=part(kind, *args, **options))


def written_through(kind, *args):
    return ac(lambda s, x: (h := s.a(x), s.d(h).add_(1), s.c(h))[2], d=part(kind, *args))


def written_after_use(s, x):
    first = s.c(h := s.a(x))
    h.add_(1)
    return first + s.c(h * s.b(x))


for kind in (nn.Hardsigmoid, nn.ELU, nn.Hardtanh, nn.SiLU, nn.ReLU6):
    accepts(f"writes in place: {kind.__name__}, read elsewhere", read_elsewhere(kind, inplace=True))
accepts("written through Identity", written_through(nn.Identity))
accepts("written through Flatten", written_through(nn.Flatten))
accepts("written through Dropout", written_through(nn.Dropout, 0.0))
either("writes into the input", ac(lambda s, x: (x.add_(1), s.c(s.a(x)))[1]))
either("writes into a view of the input", ac(lambda s, x: (x[:, :3].zero_(), s.c(s.a(x)))[1]))
either("writes into what was already used", abc(written_after_use))
for kind in (nn.AlphaDropout, nn.FeatureAlphaDropout):
    for in_place in (False, True):
        dropped = ac(lambda s, x: s.c(s.d(s.a(x))), d=part(kind, 0.5, in_place))
        accepts(f"{kind.__name__}{' in place' if in_place else ''}", dropped, varies=True)
    either(f"{kind.__name__} in place, read elsewhere", read_elsewhere(kind, 0.5, True), varies=True)

# Functions that torch.export may take as a whole ----------------------------------------------------------------------


@torch.fx.wrap
def add_one_in_place(h):
    h.add_(1)
    return h


@torch.fx.wrap
def mixed_by_a_function(h):
    return h.cumsum(1) + 1


@torch.fx.wrap
def weight_by_a_function(weight):
    return weight - weight.mean(0)


class MixesUnits(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx, h):
        return h.cumsum(1) + 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(1).cumsum(1).flip(1)


@torch.library.custom_op("leaking_networks::mixed", mutates_args=())
def mixed(h: torch.Tensor) -> torch.Tensor:
    return h.cumsum(1) + 1


@torch.library.custom_op("leaking_networks::add_one", mutates_args={"h"})
def add_one(h: torch.Tensor) -> None:
    h.add_(1)


@torch.library.custom_op("leaking_networks::layer", mutates_args=())
def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ (weight - weight.mean(0)).T


mixed.register_fake(torch.empty_like)
layer.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))


def checkpointed(s, x):
    return s.c(checkpoint(lambda y: torch.tanh(s.a(y)).cumsum(1) + s.b(y), x, use_reentrant=False))


def checkpointed_in_place(s, x):
    return s.c(checkpoint(lambda h: h.view(-1).add_(1).view(-1, 4), s.a(x), use_reentrant=False))


def checkpointed_in_the_older_way(s, x):
    return s.c(checkpoint(lambda y: s.a(y).cumsum(1) + 1, x, use_reentrant=True))


def chosen_on_the_device(s, x):
    return s.c(torch.cond(x.sum() > 0, lambda h: h + 1, lambda h: h - 1, (s.a(x),)))


def no_gradient(s, x):
    with torch.no_grad():
        h = torch.tanh(s.a(x)) + 1
    return s.c(h)


def lower_precision(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.tanh(s.a(x)) + 1
    return s.c(h.float())


either("wrapped function that writes in place", writes(add_one_in_place))
either("wrapped function that mixes units", between(mixed_by_a_function))
either("wrapped function of a weight", ac(lambda s, x: s.c(F.linear(x, weight_by_a_function(s.a.weight), s.a.bias))))
accepts("wrapped function called as it is", between(lambda h: mixed_by_a_function(h)))
either("function with its own gradient", between(MixesUnits.apply))
either("operation of one's own", between(mixed))
either("operation of one's own that writes in place", writes(add_one))
either("operation of one's own on a weight", wc(lambda s, x: s.c(layer(x, s.w))))
accepts("checkpointed block", abc(checkpointed))
either("checkpointed block, written in place", ac(checkpointed_in_place))
either("checkpointed in the older way", ac(checkpointed_in_the_older_way))
either("function mapped over samples", between(torch.vmap(lambda h: h.cumsum(0) + 1)))
either("branch chosen on the device", ac(chosen_on_the_device))
either("layer without gradient", ac(no_gradient))
either("layer in lower precision", ac(lower_precision))

# Buffers and attributes that a forward changes, norms written by hand -------------------------------------------------


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


def own_buffers(s, x):
    return s.c(F.batch_norm(s.a(x), s.n, s.v, training=s.training))


def learned_statistics(s, x):
    return s.c(F.batch_norm(s.a(x), s.n.detach(), s.v.detach().abs() + 1))


def images(norm, *args, **options):
    return kc(lambda s, x: s.c(torch.tanh(s.n(s.k(x))).mean((2, 3))), n=part(norm, *args, **options))


either("buffer counted up", ac(counted, n=K(torch.ones(4))))
either("moving average of units", ac(moving_average, n=K(torch.zeros(4))))
either("buffer replaced", ac(buffer_replaced, n=K(torch.zeros(4))))
either("attribute replaced", ac(attribute_replaced))
either("calls counted", ac(number_counted), varies=True)
either("batch statistics by hand", ac(by_hand, g=P(4), b=P(4)))
either("F.batch_norm on own buffers", ac(own_buffers, n=K(torch.zeros(4)), v=K(torch.ones(4))))
either("F.batch_norm with learned statistics", ac(learned_statistics, n=P(4), v=P(4)))
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
accepts("layer norm over two axes", ac(lambda s, x: s.c(s.n(s.a(x)).mean(1)), n=part(nn.LayerNorm, (3, 4))), TOKENS)
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


def patched_to_standardise():
    return patched(nn.Linear(4, 4), lambda s, x: F.linear(x, standard(s.weight), s.bias))


def patched_norm():
    norm = patched(nn.BatchNorm1d(4), lambda s, x: x - x.mean(1, keepdim=True))
    return nn.Sequential(nn.Linear(6, 4), norm, nn.Tanh(), nn.Linear(4, 3))


def patched_activation():
    activation = patched(nn.ReLU(), lambda s, x: x.flip(1).cumsum(1))
    return nn.Sequential(nn.Linear(6, 4), activation, nn.Linear(4, 3))


LORA = net(lambda s, x: s.l(x) + 0.5 * s.up(s.down(x)), l=L(4, 4), down=L(4, 2, bias=False), up=L(2, 4, bias=False))
accepts("LoRA by a patched forward", after_units(patched_lora))
accepts("linear layer patched to standardise", after_units(patched_to_standardise))
accepts("LoRA as a module", after_units(LORA))
either("norm with a patched forward", patched_norm)
either("activation with a patched forward", patched_activation)


def subclass(name, base, forward, *args, **makers):
    """Return a factory of networks with a module whose name, or base class, promises another forward."""

    def make():
        module = type(name, (base,), {"forward": forward})(*args)
        for attribute, maker in makers.items():
            setattr(module, attribute, maker())
        return nn.Sequential(nn.Linear(6, 4), module, nn.Linear(4, 3))

    return make


def transposed_maps():
    flatten = type("Flatten", (nn.Flatten,), {"forward": lambda s, x: x.transpose(1, 2).flatten(1)})()
    return nn.Sequential(nn.Conv2d(2, 4, 3), flatten, nn.Linear(16, 3))


def norm_over_units(s, x):
    return x * s.weight + s.bias + x.mean(1, True)


def norm_with_a_sum(s, x):
    return F.layer_norm(x, (4,), s.weight, s.bias) + x.sum(1, True)


def turned_round(s, x):
    return F.linear(x.flip(1), s.weight, s.bias)


accepts("DropPath with a weight", subclass("DropPath", nn.Module, lambda s, x: s.l(x) + x, l=L(4, 4)))
accepts("StochasticDepth that mixes units", subclass("StochasticDepth", nn.Module, lambda s, x: x.cumsum(1) + 1))
accepts("DropBlock2d with a parameter", subclass("DropBlock2d", nn.Module, lambda s, x: x + s.g, g=P(4)))
accepts("ReLU that shifts its units", subclass("ReLU", nn.ReLU, lambda s, x: F.relu(x).roll(1, 1)))
accepts("ReLU that sums its units", subclass("ReLU", nn.ReLU, lambda s, x: F.relu(x) + x.sum(1, keepdim=True)))
accepts("Identity that adds one", subclass("Identity", nn.Identity, lambda s, x: x + 1))
accepts("Identity with a weight", subclass("Identity", nn.Identity, lambda s, x: s.l(x), l=L(4, 4)))
accepts("Dropout that turns its units round", subclass("Dropout", nn.Dropout, lambda s, x: x.flip(1)))
accepts("Flatten that adds one", subclass("Flatten", nn.Flatten, lambda s, x: x.flatten(1) + 1))
accepts("Tanh with a bias", subclass("Tanh", nn.Tanh, lambda s, x: torch.tanh(x) + s.g, g=P(4)))
accepts("BatchNorm1d over units", subclass("BatchNorm1d", nn.BatchNorm1d, norm_over_units, 4))
accepts("LayerNorm with a sum", subclass("LayerNorm", nn.LayerNorm, norm_with_a_sum, 4))
accepts("Linear applied to its input turned round", subclass("Linear", nn.Linear, turned_round, 4, 4))
accepts("Flatten of transposed maps", transposed_maps, IMAGE)


def mode_that_is_set(s, x):
    s.n.eval()
    return s.c(s.n(s.a(x)))


class Child(nn.Module):
    """Has a mode of its class."""

    training: bool = True

    def forward(self, x):
        return x if self.training else torch.tanh(x)


accepts("mode set by the forward", ac(mode_that_is_set, n=part(nn.BatchNorm1d, 4, affine=False)))
accepts("path by the mode of a child", ac(lambda s, x: s.c(s.n(s.a(x)) * (1 + s.n.__dict__["training"])), n=NORM))
accepts("child with a mode of its class", ac(lambda s, x: s.c(s.d(s.a(x))), d=Child))

HOOKS = {
    "forward hook that adds one": ("register_forward_hook", lambda module, args, out: out + 1),
    "forward hook that mixes units": ("register_forward_hook", lambda module, args, out: out.cumsum(1)),
    "hook in front that adds one": ("register_forward_pre_hook", lambda module, args: (args[0] + 1,)),
    "hook that writes in place": ("register_forward_hook", lambda module, args, out: args[0].add_(1)),
}


def hooked(register, hook):
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    getattr(net[1], register)(hook)
    return net


for name, (register, hook) in HOOKS.items():
    either(name, lambda register=register, hook=hook: hooked(register, hook))
