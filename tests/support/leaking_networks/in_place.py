"""Writing in place, through whatever lies in the same memory."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.leaking_networks.constants import POSITIONS
from support.leaking_networks.kit import L, P, abc, ac, accepts, between, either, net, part

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


def writes(function):
    """A network that computes units, has a function write into them, and reads them."""

    def forward(s, x):
        h = s.a(x)
        function(h)
        return s.c(h)

    return ac(forward)


def written_through(alias):
    return writes(lambda h: alias(h).add_(1))


# Of these, what reads another part of torch than tensors' own memory may be refused.
ODD = {"unbind", "unfold", "data", "as_strided", "view of another type", "meshgrid", "detach", "real"}
for name, alias in ALIASES.items():
    (either if name in ODD else accepts)(f"written through {name}", written_through(alias))


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
    rows = h.detach().unbind(1)
    for number, row in enumerate(rows):
        row.detach().add_(number)
    return h


def slices_set(h):
    h[:, ::2] = 1.0
    return h


def units_copied(h):
    h[:, 0] = h[:, 1]
    h[:, 2:].copy_(h[:, :2])
    return h


def half_filled(h):
    h.narrow(1, 0, 2).fill_(3.0)
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


def write_to_a_slice_of_a_copy(h):
    g = h.clone()
    g[:, 0].add_(1)
    return h + g


IN_PLACE = {
    "a sibling view": through_a_sibling,
    "a cousin view": through_a_cousin,
    "view_as_real": through_the_real_part,
    "the imaginary part": with_imaginary_part,
    "itself, after it was read": later_than_read,
    "each column": only_through_views,
    "every other unit set": slices_set,
    "units copied onto others": units_copied,
    "half of it filled": half_filled,
    "where it is zero": set_where,
    "a tensor of zeros": into_a_buffer_of_zeros,
    "one half from the other": list_of_views_summed,
    "a slice of a copy": write_to_a_slice_of_a_copy,
    "masked_fill_": lambda h: (h.masked_fill_(h.detach() == 0, 3.0), h)[1],
    "masked_fill_ of the input's mask": lambda h: (h.masked_fill_(POSITIONS > 1, 3.0), h)[1],
    "index_fill_": lambda h: (h.index_fill_(1, torch.tensor([0, 2]), 7.0), h)[1],
    "index_add_": lambda h: (h.index_add_(1, torch.tensor([0, 2]), torch.ones(h.shape[0], 2)), h)[1],
    "scatter_": lambda h: (h.scatter_(1, torch.ones(h.shape[0], 1, dtype=torch.long), 7.0), h)[1],
    "zero_": lambda h: (h[:, :2].zero_(), h.add_(1))[1],
    "add_ with alpha": lambda h: (h.add_(torch.ones(4), alpha=3), h)[1],
    "addcmul_": lambda h: (h.addcmul_(torch.ones(4), torch.ones(4), value=2), h)[1],
    "lerp_": lambda h: (h.lerp_(torch.ones(4), 0.5), h)[1],
    "cumsum_": lambda h: (h.cumsum_(1), h)[1],
    "sigmoid_ of a slice": lambda h: (h[:, 1:].sigmoid_(), h)[1],
    "resize by hand": lambda h: (h.t_(), h.t())[1],
    "out=": lambda h: (torch.add(h.detach(), 1, out=h.detach()), h)[1],
    "out= of a slice": lambda h: (torch.exp(h.detach()[:, 2:], out=h.detach()[:, 2:]), h)[1],
    "threshold in place": lambda h: (F.threshold(h, 0.1, 5.0, inplace=True), h)[1],
    "hard sigmoid in place": lambda h: (F.hardsigmoid(h, inplace=True), h)[1],
    "iadd": lambda h: (h.__iadd__(1), h)[1],
    "foreach": lambda h: (torch._foreach_add_([h[:, :2], h[:, 2:]], 1.0), h)[1],
}
MAY_FAIL = {
    "each column",
    "view_as_real",
    "the imaginary part",
    "where it is zero",
    "resize by hand",
    "out=",
    "out= of a slice",
    "foreach",
}
for name, function in IN_PLACE.items():
    (either if name in MAY_FAIL else accepts)(f"writes in place: {name}", between(function))
for kind in (nn.Hardsigmoid, nn.ELU, nn.Hardtanh, nn.SiLU, nn.ReLU6):
    accepts(
        f"writes in place: {kind.__name__}, read elsewhere",
        ac(lambda s, x: (h := s.a(x), s.d(h), s.c(h))[2], d=part(kind, inplace=True)),
    )
accepts("written through Identity", ac(lambda s, x: (h := s.a(x), s.d(h).add_(1), s.c(h))[2], d=part(nn.Identity)))
accepts("written through Flatten", ac(lambda s, x: (h := s.a(x), s.d(h).add_(1), s.c(h))[2], d=part(nn.Flatten)))
accepts("written through Dropout", ac(lambda s, x: (h := s.a(x), s.d(h).add_(1), s.c(h))[2], d=part(nn.Dropout, 0.0)))
either("writes into the input", ac(lambda s, x: (x.add_(1), s.c(s.a(x)))[1]))
either("writes into a view of the input", ac(lambda s, x: (x[:, :3].zero_(), s.c(s.a(x)))[1]))
either(
    "writes into what was already used", abc(lambda s, x: (h := s.a(x), y := s.c(h), h.add_(1), y + s.c(h * s.b(x)))[3])
)
for name, kind in {"AlphaDropout": nn.AlphaDropout, "FeatureAlphaDropout": nn.FeatureAlphaDropout}.items():
    for in_place in (False, True):
        accepts(
            f"{name}{' in place' if in_place else ''}",
            ac(lambda s, x: s.c(s.d(s.a(x))), d=part(kind, 0.5, in_place)),
            varies=True,
        )
    either(
        f"{name} in place, read elsewhere",
        ac(lambda s, x: (h := s.a(x), s.d(h), s.c(h))[2], d=part(kind, 0.5, True)),
        varies=True,
    )


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


either("wrapped function that writes in place", writes(add_one_in_place))
either("wrapped function that mixes units", between(mixed_by_a_function))
either("wrapped function of a weight", ac(lambda s, x: s.c(F.linear(x, weight_by_a_function(s.a.weight), s.a.bias))))
accepts("wrapped function called as it is", between(lambda h: mixed_by_a_function(h)))


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

either("function with its own gradient", between(MixesUnits.apply))
either("operation of one's own", between(mixed))
either("operation of one's own that writes in place", writes(add_one))
either("operation of one's own on a weight", net(lambda s, x: s.c(layer(x, s.w)), w=P(4, 6), c=L(4, 3)))
accepts(
    "checkpointed block",
    abc(lambda s, x: s.c(checkpoint(lambda y: torch.tanh(s.a(y)).cumsum(1) + s.b(y), x, use_reentrant=False))),
)
either(
    "checkpointed block, written in place",
    ac(lambda s, x: s.c(checkpoint(lambda h: h.view(-1).add_(1).view(-1, 4), s.a(x), use_reentrant=False))),
)
either(
    "checkpointed in the older way",
    ac(lambda s, x: s.c(checkpoint(lambda y: s.a(y).cumsum(1) + 1, x, use_reentrant=True))),
)
either("function mapped over samples", between(torch.vmap(lambda h: h.cumsum(0) + 1)))
either(
    "branch chosen on the device",
    ac(lambda s, x: s.c(torch.cond(x.sum() > 0, lambda h: h + 1, lambda h: h - 1, (s.a(x),)))),
)
either("layer without gradient", ac(lambda s, x: s.c(no_gradient(s, x))))
either("layer in lower precision", ac(lambda s, x: s.c(lower_precision(s, x).float())))


def no_gradient(s, x):
    with torch.no_grad():
        return torch.tanh(s.a(x)) + 1


def lower_precision(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(s.a(x)) + 1
