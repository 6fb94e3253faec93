"""Gate: soft mask ``a = σ(s · e)`` of the task in training, with scale ``s`` and embedding ``e`` (HAT, ICML 2018).

Also selects the units that a training step computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from avalanche_amnesia.unit_graph.masking import LayerMasks, OpenEntries

SHUT = 1e-12
"""Gates up to this value are set to 0. Chosen by measurement: ``experiments/results/shut_gates.md``."""
FAR = 85.0
"""Units with ``s·e`` below ``-FAR`` are not computed.

Their gates, below e^-85, are set to 0. The gradient of the embedding would be σ'(s·e)·s_max·(cosh c + 1) /
(cosh e + 1) times the gradient of the gate: with c = 50 and s_max = 400 less than 1e-12 times, too little to change a
number of single precision.
"""
EVERY = 16
"""Number of training steps between two searches for further units that need not be computed."""

EntriesOf = Callable[[Tensor], Mapping[str, OpenEntries]]
"""Function that maps used units, bool ``(n_units,)``, to the weight entries they use, for mostly unused weights."""


class ComputedUnits:
    """Selection of the units that a training step computes: all except units whose gate is practically 0.

    Every step checks the excluded units, and includes them again before their gates become nonzero. For a mask that no
    longer changes, exactly the closed units are excluded.
    """

    def __init__(self, entries_of: EntriesOf) -> None:
        self.entries: Mapping[str, OpenEntries] = {}
        self._entries_of = entries_of
        self._left_out: Tensor | None = None
        self._looks = 0

    def exclude(self, units: Tensor) -> None:
        """Replace the set of excluded units by those where ``units``, bool ``(n_units,)``, is True."""
        if self._left_out is None or not torch.equal(units, self._left_out):
            self._left_out, self._bounds = units, torch.where(units, -FAR, math.inf)
            self.entries = self._entries_of(~units)

    def update_selection(self, exponent: Tensor) -> None:
        """On a CPU, exclude units whose gates are almost 0: ``exponent = scale · embedding < -FAR``, ``(n_units,)``."""
        if exponent.device.type != "cpu":  # compute all units, because the check would synchronise the device
            return
        turn, self._looks = self._looks % EVERY == 0, self._looks + 1
        if turn or (self.entries and bool((exponent > self._bounds).any())):  # a unit left out is opening
            self.exclude(exponent < -FAR)


class Gate:
    """Soft mask ``a = σ(s · e)`` over all units, with scale ``s`` and embedding ``e``; one leaf tensor per layer.

    Gradients accumulate in the leaves over all forward passes until the next :meth:`update`. The gradient's last step,
    to the embedding, is short, so it is computed by hand, once per training step.

    In the leaves, gates up to :data:`SHUT` are exactly 0. Learned embeddings close units to 1e-20 and less for most of
    an epoch. Products with such gates would be denormal floats, which make common processors several times slower.
    The embedding's gradient and the regulariser use the exact ``a``.
    """

    _fixed_at: float | None

    @torch.no_grad()
    def __init__(
        self,
        embedding: nn.Parameter,
        by_layer: Callable[[Tensor], Mapping[str, Tensor]],
        entries_of: EntriesOf,
    ) -> None:
        self.embedding = embedding
        self.value, self._read, self._exponent = (torch.empty_like(embedding) for _ in range(3))
        self.leaves = LayerMasks({name: part.requires_grad_() for name, part in by_layer(self._read).items()})
        self._entries_of = entries_of
        self.reread()
        self.update(1.0)

    @torch.no_grad()
    def update(self, scale: float, *, learns: bool = True) -> Tensor:
        """Update and return the mask ``a = σ(scale · embedding)``; ``learns``: whether the mask collects gradients."""
        if not learns and scale == self._fixed_at:
            return self.value
        torch.mul(self.embedding, scale, out=self._exponent)
        if learns:
            self._computed.update_selection(self._exponent)
        torch.sigmoid(self._exponent, out=self.value)
        torch.threshold(self.value, SHUT, 0.0, out=self._read)
        if not learns:
            self._computed.exclude(~(self._read > 0))
        self._fixed_at, self.leaves.entries = None if learns else scale, self._computed.entries
        for leaf in self.leaves.values():
            leaf.grad = None
            leaf.requires_grad_(learns)
        return self.value

    def reread(self) -> None:
        """Discard values computed from the embedding, so that :meth:`update` uses the newly loaded embedding."""
        self._computed = ComputedUnits(self._entries_of)
        self._fixed_at = None

    def gradient(self) -> Tensor:
        """Return the loss's gradient with respect to the mask ``a``, ``(n_units,)``; 0 for units without a gradient."""
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves.values()])

    def open_units(self) -> Tensor:
        """Return a bool tensor ``(n_units,)``, True for open units (``a > 0.5``)."""
        return self.embedding.detach() > 0  # σ(s·e) > ½ at every scale
