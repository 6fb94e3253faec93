"""Kit for hand-written networks: where they are entered, and short words for their parts."""

from functools import partial

import torch
import torch.ao.nn.qat
from torch import nn

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
