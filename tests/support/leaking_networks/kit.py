"""Kit for hand-written networks: the functions that add them to the table, and short names for their parts."""

from functools import partial

import torch
from torch import nn

from support.small_networks import C, L, P, lived_in, parts

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


def part(kind, *args, **options):
    """Return a factory of modules; norms get values that no initialisation makes."""
    made = partial(kind, *args, **options)
    return (lambda: lived_in(made())) if "Norm" in kind.__name__ else made


def K(value):
    """A constant buffer."""
    return lambda: torch.as_tensor(value).clone()


# Factories with layers that most networks have; a caller may replace one, or add parts.
EMBEDDING = part(nn.Embedding, 9, 4)
PARTS = {"a": L(6, 4), "b": L(6, 4), "c": L(4, 3), "d": L(4, 4), "e": EMBEDDING, "k": C(2, 4, 3), "w": P(4, 6)}


ac, abc, acd, ec, kc, wc = (
    lambda forward, names=names, **makers: parts(forward, **{name: PARTS[name] for name in names} | makers)
    for names in ("ac", "abc", "acd", "ec", "kc", "wc")
)


def between(function, **makers):
    """Two layers, and a function between them."""
    return ac(lambda s, x: s.c(function(s.a(x))), **makers)


def beside(function, **makers):
    """Two layers, a function of both outputs, and a last layer."""
    return abc(lambda s, x: s.c(function(s.a(x), s.b(x))), **makers)


def maps(function, width):
    """A convolution, a function of its maps, and a last layer."""
    return kc(lambda s, x: s.c(function(torch.tanh(s.k(x))).flatten(1) + 1), c=L(width, 3))
