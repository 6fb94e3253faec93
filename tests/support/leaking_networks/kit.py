"""Kit for hand-written networks: the functions that add them to the table, and short names for their parts."""

from functools import partial

import torch
from torch import nn

FLAT, IMAGE, TOKENS, WORDS = (6,), (2, 4, 4), (3, 6), (3,)

NETWORKS = {}
ACCEPTED = set()  # names of the networks that MaskedModel must accept
VARYING = set()  # names of the networks with random results: their function is not compared


def accepts(name, factory, shape=FLAT, options=None, **marks):
    """Add a network that must be accepted, and protected."""
    ACCEPTED.add(name)
    either(name, factory, shape, options, **marks)


def either(name, factory, shape=FLAT, options=None, *, varies=False):
    """Add a network that may be refused; if it is accepted, it must be protected."""
    assert name not in NETWORKS
    NETWORKS[name] = (factory, shape, options or {})
    if varies:
        VARYING.add(name)


class Net(nn.Module):
    """Any parts under any forward function; parts that are plain tensors become buffers."""

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


def part(kind, *args, **options):
    """Return a factory of modules; norms get values that no initialisation makes."""

    @torch.no_grad()
    def make():
        module = kind(*args, **options)
        if "Norm" in kind.__name__:
            for value in module.parameters():
                value.copy_(torch.rand(value.shape) + 0.5)
        return module

    return make


def L(n_in, n_out, **options):
    return partial(nn.Linear, n_in, n_out, **options)


def C(*sizes, **options):
    return partial(nn.Conv2d, *sizes, **options)


def E(n):
    return part(nn.Embedding, n, 4)


def P(*shape):
    """A parameter."""
    return lambda: nn.Parameter(torch.randn(shape) * 0.5)


def K(value):
    """A constant buffer."""
    return lambda: torch.as_tensor(value).clone()


def net(forward, **makers):
    """Return a factory of networks."""
    return partial(Net, forward, **makers)


# Factories with layers that most networks have; a caller may replace one, or add parts.
PARTS = {"a": L(6, 4), "b": L(6, 4), "c": L(4, 3), "d": L(4, 4), "e": E(9), "k": C(2, 4, 3), "w": P(4, 6)}


def having(names):
    return lambda forward, **makers: net(forward, **{**{name: PARTS[name] for name in names}, **makers})


ac, abc, acd, ec, kc, wc = map(having, ("ac", "abc", "acd", "ec", "kc", "wc"))


def between(function, **makers):
    """Two layers, and a function between them."""
    return ac(lambda s, x: s.c(function(s.a(x))), **makers)


def beside(function, **makers):
    """Two layers, a function of both outputs, and a last layer."""
    return abc(lambda s, x: s.c(function(s.a(x), s.b(x))), **makers)


def maps(function, width):
    """A convolution, a function of its maps, and a last layer."""
    return kc(lambda s, x: s.c(function(torch.tanh(s.k(x))).flatten(1) + 1), c=L(width, 3))
