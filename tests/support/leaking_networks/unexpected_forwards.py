"""Modules whose forward is not what their class says."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig

from support.leaking_networks.computed_weights import behind_units, standard
from support.leaking_networks.kit import FLAT, IMAGE, C, L, P, accepts, either, net, part

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
