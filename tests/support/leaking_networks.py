"""Networks in which a masked unit's value, or an entry outside a mask, finds a way around the masks.

Each is to be refused, or to be protected to the bit: see test_leaking_networks.py. ``NETWORKS`` has them all, name →
(factory, shape of one input, further options of MaskedModel). Those entered by ``accepts`` must go in: torch.export
takes every one of them apart into operations, but for the batch norm without momentum in training mode, or they have
always gone in. Those entered by ``either`` may be refused.
"""

import random
from functools import partial

import timm.layers
import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

FLAT, IMAGE, TOKENS, WORDS = (6,), (2, 4, 4), (3, 6), (3,)

NETWORKS = {}
ACCEPTED = set()  # names of the networks that must go in
VARYING = set()  # names of those that never give the same twice, whose function is not compared


def accepts(name, factory, shape=FLAT, options=None, **marks):
    """Enter a network that must go in, protected."""
    ACCEPTED.add(name)
    either(name, factory, shape, options, **marks)


def either(name, factory, shape=FLAT, options=None, *, varies=False):
    """Enter a network that may be refused; if it goes in, protected."""
    assert name not in NETWORKS
    NETWORKS[name] = (factory, shape, options or {})
    if varies:
        VARYING.add(name)


class Net(nn.Module):
    """Parts of the network's own choice around its forward; parts that are plain tensors become buffers."""

    def __init__(self, forward, **makers):
        super().__init__()
        for name, maker in makers.items():
            part = maker()
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.given = (forward,)

    def forward(self, x):
        return self.given[0](self, x)


def net(forward, **makers):
    """A factory of networks."""
    return partial(Net, forward, **makers)


def L(n_in, n_out, **options):
    return partial(nn.Linear, n_in, n_out, **options)


def C(*sizes, **options):
    return partial(nn.Conv2d, *sizes, **options)


def P(*shape):
    """A parameter."""
    return lambda: nn.Parameter(torch.randn(shape) * 0.5)


def K(value):
    """A constant buffer."""
    return lambda: torch.as_tensor(value).clone()


def part(kind, *args, **options):
    """A module without, or with, weights of its own; norms get values that no initialisation makes."""

    @torch.no_grad()
    def make():
        module = kind(*args, **options)
        if "Norm" in kind.__name__:
            for value in module.parameters():
                value.copy_(torch.rand(value.shape) + 0.5)
        return module

    return make


def ac(forward, **makers):
    return net(forward, a=L(6, 4), c=L(4, 3), **makers)


def abc(forward, **makers):
    return net(forward, a=L(6, 4), b=L(6, 4), c=L(4, 3), **makers)


def kc(forward, **makers):
    return net(forward, k=C(2, 4, 3), c=L(4, 3), **makers)


def between(function, **makers):
    """Two layers, and something between them."""
    return ac(lambda s, x: s.c(function(s.a(x))), **makers)


def beside(function, **makers):
    """Two layers under something that reads both, and one behind it."""
    return abc(lambda s, x: s.c(function(s.a(x), s.b(x))), **makers)


# Weights that are computed from others ---------------------------------------------------------------------------


def standard(weight):
    """Each unit's weights with mean 0 and deviation 1: whoever moves one of a row moves them all."""
    flat = weight.flatten(1)
    flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
    return flat.view_as(weight)


class ConvForwardStandardises(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, standard(weight), bias)


class ConvStandardises(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, standard(self.weight), self.bias)


class LinearStandardises(nn.Linear):
    def forward(self, x):
        return F.linear(x, standard(self.weight), self.bias)


class LinearCentred(nn.Linear):
    """The weights are centred over the units."""

    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(0), self.bias)


class LinearByItsLargest(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / self.weight.abs().max(), self.bias)


class LinearOfSigns(nn.Linear):
    """Binary weights with one scale for all, and the gradient of what they are made from."""

    def forward(self, x):
        binary = self.weight.sign() * self.weight.abs().mean()
        return F.linear(x, self.weight + (binary - self.weight).detach(), self.bias)


class LinearOfTheLargest(nn.Linear):
    """The weights below the median are left out."""

    def forward(self, x):
        return F.linear(x, self.weight * (self.weight.abs() >= self.weight.abs().median()), self.bias)


class LinearByProperty(nn.Linear):
    """What everyone reads as its weight is computed from another parameter."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach().clone())

    @property
    def weight(self):
        return self.raw - self.raw.mean(0)


class LinearCalledInAnotherWay(nn.Linear):
    def __call__(self, x):
        return super().__call__(x).roll(1, 1)


def computed(kind, *options):
    """A layer of a kind behind masked units: its weights' columns are in use, or not, one by one."""
    if issubclass(kind, nn.Linear):
        return behind_units(part(kind, 4, 4, *options))
    return net(
        lambda s, x: s.c(torch.tanh(s.k(torch.tanh(s.a(x)))).flatten(1)),
        a=C(2, 4, 3),
        k=part(kind, 4, 4, 2, *options),
        c=L(4, 3),
    )


def behind_units(make):
    """A layer of four units behind four others, as a factory."""
    return lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), make(), nn.Tanh(), nn.Linear(4, 3))


accepts("convolution whose _conv_forward standardises", computed(ConvForwardStandardises), IMAGE)
accepts("convolution that standardises", computed(ConvStandardises), IMAGE)
accepts("linear layer that standardises", computed(LinearStandardises))
accepts("timm's StdConv2d", computed(timm.layers.StdConv2d), IMAGE)
accepts("timm's ScaledStdConv2d", computed(timm.layers.ScaledStdConv2d), IMAGE)
either("weights centred over units", computed(LinearCentred))
either("weights divided by the largest", computed(LinearByItsLargest))
either("signs of weights under one scale", computed(LinearOfSigns))
either("the larger half of the weights", computed(LinearOfTheLargest))
either("weight behind a property", computed(LinearByProperty))
either("linear layer with its own __call__", computed(LinearCalledInAnotherWay))
either(
    "product of two factors as a weight",
    ac(lambda s, x: s.c(F.linear(torch.tanh(s.a(x)), s.u @ s.v)), u=P(4, 2), v=P(2, 4)),
)
either(
    "product of two normalised factors as a weight",
    ac(lambda s, x: s.c(F.linear(torch.tanh(s.a(x)), s.u @ F.normalize(s.v, dim=1))), u=P(4, 2), v=P(2, 4)),
)
either(
    "mixture of weights",
    ac(
        lambda s, x: s.c(F.linear(torch.tanh(s.a(x)), (s.g.softmax(0)[:, None, None] * s.w).sum(0))),
        g=P(2),
        w=P(2, 4, 4),
    ),
)
either(
    "weight centred through functional_call",
    ac(lambda s, x: torch.func.functional_call(s.c, {"weight": standard(s.c.weight)}, (torch.tanh(s.a(x)),))),
)


class Centred(nn.Module):
    def forward(self, weight):
        return weight - weight.mean(1, keepdim=True)


def reparametrised(function, **options):
    return behind_units(lambda: function(nn.Linear(4, 4), **options))


either("weight norm", reparametrised(parametrizations.weight_norm))
either("weight norm over all", reparametrised(parametrizations.weight_norm, dim=None))
either("spectral norm", reparametrised(parametrizations.spectral_norm))
either("orthogonal weight", reparametrised(parametrizations.orthogonal))
either("older weight norm", reparametrised(nn.utils.weight_norm))
either("older spectral norm", reparametrised(nn.utils.spectral_norm))
either(
    "parametrisation of one's own",
    reparametrised(lambda layer: parametrize.register_parametrization(layer, "weight", Centred())),
)


# Modules whose forward is not what their class says --------------------------------------------------------------

QAT = get_default_qat_qconfig("fbgemm")

either("linear layer for quantisation", behind_units(part(torch.ao.nn.qat.Linear, 4, 4, qconfig=QAT)))
either(
    "convolution for quantisation",
    net(
        lambda s, x: s.c(torch.tanh(s.k(torch.tanh(s.a(x)))).flatten(1)),
        a=C(2, 4, 3),
        k=part(torch.ao.nn.qat.Conv2d, 4, 4, 2, qconfig=QAT),
        c=L(4, 3),
    ),
    IMAGE,
)


def patched():
    """LoRA put into a layer from outside."""
    layer = nn.Linear(4, 4)
    layer.A, layer.B = P(2, 4)(), P(4, 2)()
    layer.forward = lambda x: F.linear(x, layer.weight + layer.B @ layer.A, layer.bias)
    return layer


def patched_to_standardise():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: F.linear(x, standard(layer.weight), layer.bias)
    return layer


def patched_norm():
    """A norm whose forward was replaced by one that looks at all channels."""
    norm = nn.BatchNorm1d(4)
    norm.forward = lambda x: x - x.mean(1, keepdim=True)
    return nn.Sequential(nn.Linear(6, 4), norm, nn.Tanh(), nn.Linear(4, 3))


def patched_activation():
    activation = nn.ReLU()
    activation.forward = lambda x: x.flip(1).cumsum(1)
    return nn.Sequential(nn.Linear(6, 4), activation, nn.Linear(4, 3))


class LoRA(nn.Module):
    """The layer, and a small one beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.up(self.down(x))


accepts("LoRA by a patched forward", behind_units(patched))
accepts("linear layer patched to standardise", behind_units(patched_to_standardise))
accepts("LoRA as a module", behind_units(LoRA))
either("norm with a patched forward", patched_norm)
either("activation with a patched forward", patched_activation)


def subclass(name, base, forward, *args, **makers):
    """A module between two layers that is named, or descends, as what it is not."""

    def make():
        module = type(name, (base,), {"forward": forward})(*args)
        for attribute, maker in makers.items():
            setattr(module, attribute, maker())
        return nn.Sequential(nn.Linear(6, 4), module, nn.Linear(4, 3))

    return make


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
accepts(
    "BatchNorm1d over units",
    subclass("BatchNorm1d", nn.BatchNorm1d, lambda s, x: x * s.weight + s.bias + x.mean(1, True), 4),
)
accepts(
    "LayerNorm with a sum",
    subclass("LayerNorm", nn.LayerNorm, lambda s, x: F.layer_norm(x, (4,), s.weight, s.bias) + x.sum(1, True), 4),
)
accepts(
    "Linear applied to its input turned round",
    subclass("Linear", nn.Linear, lambda s, x: F.linear(x.flip(1), s.weight, s.bias), 4, 4),
)
accepts(
    "Flatten of transposed maps",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3),
        type("Flatten", (nn.Flatten,), {"forward": lambda s, x: x.transpose(1, 2).flatten(1)})(),
        nn.Linear(16, 3),
    ),
    IMAGE,
)


def hooked(register, hook):
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    getattr(net[1], register)(hook)
    return net


either("forward hook that adds one", lambda: hooked("register_forward_hook", lambda module, args, out: out + 1))
either(
    "forward hook that mixes units", lambda: hooked("register_forward_hook", lambda module, args, out: out.cumsum(1))
)
either("hook in front that adds one", lambda: hooked("register_forward_pre_hook", lambda module, args: (args[0] + 1,)))
either("hook that writes in place", lambda: hooked("register_forward_hook", lambda module, args, out: args[0].add_(1)))


class ReadsAnother(nn.Module):
    """Uses the weight of a layer that lies elsewhere in the network, and is no part of it."""

    def __init__(self, other):
        super().__init__()
        self.l, self.other = nn.Linear(4, 4), (other,)

    def forward(self, x):
        return self.l(x) + self.other[0].weight.sum(0)[:4]


def reads_another():
    first = nn.Linear(6, 4)
    return nn.Sequential(first, ReadsAnother(first), nn.Linear(4, 3))


either("frozen module that reads another layer", reads_another, FLAT, {"frozen": ["1"]})
either("task's own module that reads another layer", reads_another, FLAT, {"task_owned": ["1"]})
either("module that reads another layer", reads_another)


# Integers, booleans and constants met as values ------------------------------------------------------------------

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
# torch.export takes the size of the batch for a constant in the one, the number of entries for an unknown in the other.
NOT_EXPORTED = {"take along", "masked select by a constant"}
for name, function in CONSTANTS.items():
    (either if name in NOT_EXPORTED else accepts)(name, between(function))

accepts("integer buffer added", ac(lambda s, x: s.c(s.a(x) + s.n), n=K([3, 2, 1, 0])))
accepts("integer buffer as an index", ac(lambda s, x: s.c(s.a(x)[:, s.n] + s.n), n=K([3, 2, 2, 0])))
accepts(
    "integer buffer multiplied",
    ac(lambda s, x: s.c(torch.cat([s.a(x), s.n.expand(x.shape[0], 2)], 1)[:, 2:]), n=K([0, 1])),
)
either(
    "embedding of an arg max",
    net(lambda s, x: s.c(s.e(s.a(x).argmax(1))), a=L(6, 4), e=part(nn.Embedding, 4, 4), c=L(4, 3)),
)
either(
    "embedding of rounded units",
    net(
        lambda s, x: s.c(s.e((s.a(x) * 3).long().clamp(0, 3)).sum(1)), a=L(6, 4), e=part(nn.Embedding, 4, 4), c=L(4, 3)
    ),
)
either(
    "embedding of a constant",
    net(lambda s, x: s.c(s.a(x) + s.e(torch.tensor([0, 2])).sum(0)), a=L(6, 4), e=part(nn.Embedding, 4, 4), c=L(4, 3)),
)
either("rows of a parameter by arg max", ac(lambda s, x: s.c(s.a(x) + s.g[s.a(x).argmax(1)]), g=P(4, 4)))
accepts(
    "words and places",
    net(
        lambda s, x: s.c(torch.tanh(s.e(x) + s.p(torch.arange(3)))).mean(1),
        e=part(nn.Embedding, 9, 4),
        p=part(nn.Embedding, 3, 4),
        c=L(4, 3),
    ),
    WORDS,
)
accepts(
    "padding mask from the words",
    net(
        lambda s, x: s.c((s.e(x) * (x != 0).unsqueeze(-1)).sum(1) / (x != 0).sum(1, keepdim=True).clamp(min=1)),
        e=part(nn.Embedding, 9, 4),
        c=L(4, 3),
    ),
    WORDS,
)


# Writing in place, through whatever lies in the same memory --------------------------------------------------------

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


# Norms, layers and parameters used more than once ------------------------------------------------------------------

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


# Layers written as functions, and attention ------------------------------------------------------------------------


def attention(**options):
    return part(nn.MultiheadAttention, 4, 2, **{"batch_first": True, **options})


def tokens(forward, **makers):
    return net(forward, a=L(6, 4), c=L(4, 3), **makers)


def cross(s, x):
    return s.c(s.m(s.a(x), h := torch.tanh(s.b(x)), h)[0].mean(1))


def self_attention(s, x, **options):
    h = s.a(x)
    return s.c(s.m(h, h, h, **options)[0].mean(1))


def rounded(x):
    return (x * 3).long().clamp(0, 8)


CAUSAL = torch.triu(torch.ones(3, 3), 1).bool()
accepts("F.linear", net(lambda s, x: s.c(torch.tanh(F.linear(x, s.w, s.v))), w=P(4, 6), v=P(4), c=L(4, 3)))
accepts(
    "F.conv2d with groups",
    net(lambda s, x: s.c(torch.tanh(F.conv2d(x, s.w, s.v, groups=2)).mean((2, 3))), w=P(4, 1, 3, 3), v=P(4), c=L(4, 3)),
    IMAGE,
)
accepts(
    "F.conv2d with groups behind units",
    net(
        lambda s, x: s.c(F.conv2d(torch.tanh(s.k(x)), s.w, groups=2).mean((2, 3))),
        k=C(2, 4, 3),
        w=P(4, 2, 1, 1),
        c=L(4, 3),
    ),
    IMAGE,
)
accepts(
    "F.conv_transpose2d",
    net(
        lambda s, x: s.c(F.conv_transpose2d(torch.tanh(s.k(x)), s.w).mean((2, 3))),
        k=C(2, 4, 3),
        w=P(4, 4, 2, 2),
        c=L(4, 3),
    ),
    IMAGE,
)
either("einsum with a weight", net(lambda s, x: s.c(torch.einsum("bi,oi->bo", x, s.w)), w=P(4, 6), c=L(4, 3)))
either(
    "einsum over positions",
    net(lambda s, x: s.c(torch.einsum("bti,oi,tp->bpo", x, s.w, s.v).mean(1)), w=P(4, 6), v=P(3, 2), c=L(4, 3)),
    TOKENS,
)
accepts("matmul", net(lambda s, x: s.c(torch.tanh(x @ s.w)), w=P(6, 4), c=L(4, 3)))
either("matmul from the left", net(lambda s, x: s.c(torch.tanh(s.w @ x.T).T), w=P(4, 6), c=L(4, 3)))
either(
    "bmm with a parameter",
    net(lambda s, x: s.c(torch.bmm(x, s.w.expand(x.shape[0], 6, 4)).mean(1)), w=P(1, 6, 4), c=L(4, 3)),
    TOKENS,
)
either("addmm", net(lambda s, x: s.c(torch.tanh(torch.addmm(s.v, x, s.w))), v=P(4), w=P(6, 4), c=L(4, 3)))
either(
    "addmm with factors",
    net(lambda s, x: s.c(torch.addmm(s.a(x), x, s.w, beta=2, alpha=3)), a=L(6, 4), w=P(6, 4), c=L(4, 3)),
)
either(
    "baddbmm",
    net(
        lambda s, x: s.c(torch.baddbmm(s.v, x, s.w.expand(x.shape[0], 6, 4)).mean(1)),
        v=P(1, 1, 4),
        w=P(1, 6, 4),
        c=L(4, 3),
    ),
    TOKENS,
)
either("addmv", net(lambda s, x: s.c((s.a(x) @ s.g).unsqueeze(1) * s.a(x)), a=L(6, 4), g=P(4), c=L(4, 3)))
either("tensordot", net(lambda s, x: s.c(torch.tensordot(x, s.w, ([1], [0]))), w=P(6, 4), c=L(4, 3)))
either("F.bilinear", abc(lambda s, x: s.c(F.bilinear(s.a(x), s.b(x), s.w)), w=P(4, 4, 4)))
either("nn.Bilinear", abc(lambda s, x: s.c(s.l(s.a(x), s.b(x))), l=part(nn.Bilinear, 4, 4, 4)))
either("embedding_bag", net(lambda s, x: s.c(F.embedding_bag(rounded(x), s.w)), w=P(9, 4), c=L(4, 3)))
either("nn.EmbeddingBag", net(lambda s, x: s.c(s.e(rounded(x))), e=part(nn.EmbeddingBag, 9, 4), c=L(4, 3)))

either(
    "embedding with a largest norm",
    net(lambda s, x: s.c(s.e(x).mean(1)), e=part(nn.Embedding, 9, 4, max_norm=1.0), c=L(4, 3)),
    WORDS,
)
either("lstm", tokens(lambda s, x: s.c(s.r(s.a(x))[0][:, -1]), r=part(nn.LSTM, 4, 4, batch_first=True)), TOKENS)
either("gru", tokens(lambda s, x: s.c(s.r(s.a(x))[1][0]), r=part(nn.GRU, 4, 4, batch_first=True)), TOKENS)
either("lstm cell", ac(lambda s, x: s.c(s.r(s.a(x))[0]), r=part(nn.LSTMCell, 4, 4)))
either("rnn over samples", ac(lambda s, x: s.c(s.r(s.a(x))[0]), r=part(nn.RNN, 4, 4)))
accepts(
    "lstm per task",
    tokens(lambda s, x: s.c(s.r(s.a(x))[0][:, -1]), r=part(nn.LSTM, 4, 4, batch_first=True)),
    TOKENS,
    {"task_owned": ["r"]},
)
accepts(
    "lstm of the first task",
    tokens(lambda s, x: s.c(s.r(s.a(x))[0][:, -1]), r=part(nn.LSTM, 4, 4, batch_first=True)),
    TOKENS,
    {"frozen": ["r"]},
)
accepts("self-attention", tokens(self_attention, m=attention()), TOKENS)
accepts("cross-attention", tokens(cross, b=L(6, 4), m=attention()), TOKENS)
accepts("attention with a mask", tokens(partial(self_attention, attn_mask=CAUSAL), m=attention()), TOKENS)
accepts(
    "attention, positions first",
    tokens(lambda s, x: s.c(s.m(*(s.a(x).transpose(0, 1),) * 3)[0].mean(0)), m=attention(batch_first=False)),
    TOKENS,
)
accepts("attention of dropped weights", tokens(self_attention, m=attention(dropout=0.5)), TOKENS, varies=True)
either(
    "attention's weights as features",
    tokens(lambda s, x: s.c(s.m(*(s.a(x),) * 3)[1].flatten(1)[:, :4]), m=attention()),
    TOKENS,
)
either(
    "attention with a padding mask",
    tokens(lambda s, x: self_attention(s, x, key_padding_mask=(x[..., 0] > 0) & (torch.arange(3) > 0)), m=attention()),
    TOKENS,
)
either("attention with one more learned key", tokens(self_attention, m=attention(add_bias_kv=True)), TOKENS)
either("attention with a key of zeros", tokens(self_attention, m=attention(add_zero_attn=True)), TOKENS)
either(
    "attention to keys of another width",
    tokens(lambda s, x: s.c(s.m(s.a(x), x, torch.tanh(s.b(x)))[0].mean(1)), b=L(6, 5), m=attention(kdim=6, vdim=5)),
    TOKENS,
)
either(
    "attention over samples",
    ac(lambda s, x: (h := s.a(x).unsqueeze(1), s.c(s.m(h, h, h)[0].squeeze(1)))[1], m=attention(batch_first=False)),
)
accepts(
    "encoder",
    tokens(
        lambda s, x: s.c(s.m(s.a(x)).mean(1)),
        m=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        ),
    ),
    TOKENS,
)
accepts(
    "encoder layer",
    tokens(lambda s, x: s.c(s.m(s.a(x)).mean(1)), m=part(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)),
    TOKENS,
)
either(
    "encoder layer with a padding mask",
    tokens(
        lambda s, x: s.c(s.m(s.a(x), src_key_padding_mask=(x[..., 0] > 0) & (torch.arange(3) > 0)).mean(1)),
        m=part(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True),
    ),
    TOKENS,
)
either(
    "decoder layer",
    tokens(
        lambda s, x: s.c(s.m(s.a(x), torch.tanh(s.a(x.flip(1)))).mean(1)),
        m=part(nn.TransformerDecoderLayer, 4, 2, 8, 0.0, batch_first=True),
    ),
    TOKENS,
)
either(
    "learned query",
    tokens(
        lambda s, x: s.c(F.scaled_dot_product_attention(s.q.expand(x.shape[0], 1, 4), s.a(x), s.b(x)).mean(1)),
        b=L(6, 4),
        q=P(1, 1, 4),
    ),
    TOKENS,
)
either(
    "learned keys and values",
    net(
        lambda s, x: s.c(F.scaled_dot_product_attention(s.a(x).unsqueeze(1), s.q, s.v).squeeze(1)),
        a=L(6, 4),
        q=P(1, 5, 4),
        v=P(1, 5, 4),
        c=L(4, 3),
    ),
)
either(
    "attention mask from units",
    tokens(
        lambda s, x: (h := s.a(x), s.c(F.scaled_dot_product_attention(h, h, h, attn_mask=(h @ h.mT) > 0).mean(1)))[1]
    ),
    TOKENS,
)
either(
    "learned bias of attention",
    tokens(
        lambda s, x: (h := s.a(x), s.c(F.scaled_dot_product_attention(h, h, h, attn_mask=s.g).mean(1)))[1], g=P(3, 3)
    ),
    TOKENS,
)
either(
    "unfolded convolution",
    net(lambda s, x: s.c(torch.tanh(s.w @ F.unfold(x, 3)).mean(2)), w=P(4, 18), c=L(4, 3)),
    IMAGE,
)


# Arithmetic that tells a masked zero from nothing ------------------------------------------------------------------

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


# What a forward keeps, and norms written by hand -------------------------------------------------------------------


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


# Samples and units that change places ------------------------------------------------------------------------------


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


# Control flow ------------------------------------------------------------------------------------------------------


def on_the_data(s, x):
    return s.c(s.a(x)) if x.sum() > 0 else s.c(-s.a(x))


def on_a_unit(s, x):
    h = s.a(x)
    return s.c(h) if float(h[0, 0].detach()) == 0.0 else s.c(h + 1)


def on_a_parameter(s, x):
    return s.c(s.a(x)) if s.a.weight[0, 0] > 0 else s.c(-s.a(x))


def on_the_batch(s, x):
    return s.c(s.a(x)) if x.shape[0] > 3 else s.c(s.a(x) + 1)


def on_the_last_batch(s, x):
    return s.c(s.a(x)) if len(x) % 2 else s.c(s.a(x) + s.b(x))


def on_a_number(s, x):
    return s.c(s.a(x) * x.abs().max().item())


def until_small(s, x):
    h = s.a(x)
    while h.abs().max() > 1:
        h = h / 2
    return s.c(h)


def on_chance(s, x):
    return s.c(s.a(x)) if random.random() < 0.5 else s.c(s.a(x) + s.b(x))


def layers_dropped(s, x):
    h = torch.tanh(s.a(x))
    if s.training and random.random() < 0.5:
        return s.c(h)
    return s.c(h + torch.tanh(s.d(h)))


CONTROL_FLOW_ON_VALUES = ("control flow on the data", "control flow on a unit", "control flow on a parameter")
either("control flow on the data", ac(on_the_data))
either("control flow on a unit", ac(on_a_unit))
either("control flow on a parameter", ac(on_a_parameter))
either("control flow on the number of samples", ac(on_the_batch))
either("control flow on odd batches", abc(on_the_last_batch))
either("a number from the data", ac(on_a_number))
either("loop until small", ac(until_small))
either("random path", abc(on_chance), varies=True)
either("layers dropped at random", net(layers_dropped, a=L(6, 4), d=L(4, 4), c=L(4, 3)), varies=True)
accepts("another path in training", abc(lambda s, x: s.c(s.a(x) if s.training else s.a(x) + s.b(x))))
accepts("another activation in training", ac(lambda s, x: s.c(F.rrelu(s.a(x), training=s.training) + 1)), varies=True)
