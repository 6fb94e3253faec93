"""Weights that are computed from others."""

import timm.layers
import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from support.leaking_networks.kit import IMAGE, C, L, P, ac, accepts, either, net, part


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
    """A layer whose weight, as everyone reads it, is computed from another parameter."""

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
