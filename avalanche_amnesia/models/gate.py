"""The soft mask ``a = σ(s · e)`` of the task in training (HAT, Serrà et al., ICML 2018).

Also the choice of the units that are computed in a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from avalanche_amnesia.unit_graph.masking import LayerMasks, OpenEntries

SHUT = 1e-12
"""The network reads a gate up to here as 0. Chosen by measurement: ``experiments/results/shut_gates.md``."""
FAR = 85.0
"""A unit with ``s·e`` below minus this is left out.

Its gate of e^-85 is read as 0. The loss's gradient with respect to its embedding would be σ'(s·e)·s_max·(cosh c + 1) /
(cosh e + 1) times that with respect to its gate: with c = 50 and s_max = 400 less than 1e-12 times, which moves no
number of single precision.
"""
EVERY = 16
"""Steps between two looks whether more units can be left out."""
MASKS = 32
"""Masks whose entries are remembered: as many as the tasks that share a mini-batch, mostly."""

EntriesOf = Callable[[Tensor], Mapping[str, OpenEntries]]
"""From units, bool ``(n_units,)``, to the entries of weights that these read, where it is much less than all."""


class EntriesOfMasks:
    """Entries that fixed masks read, remembered for those that were asked for last."""

    def __init__(self, entries_of: EntriesOf) -> None:
        self._entries_of = entries_of
        self._known: OrderedDict[tuple[torch.device, bytes], Mapping[str, OpenEntries]] = OrderedDict()

    def __call__(self, units: Tensor) -> Mapping[str, OpenEntries]:
        """Entries that units, bool ``(n_units,)``, read."""
        mask = units.device, units.cpu().numpy().tobytes()
        if mask not in self._known:
            self._known[mask] = self._entries_of(units)
            if len(self._known) > MASKS:
                self._known.popitem(last=False)
        self._known.move_to_end(mask)
        return self._known[mask]


class ComputedUnits:
    """Chooses the units that are computed, while a gate closes and opens.

    Units that were left out are looked at in every step, and come back before their gates are read as anything but 0.
    A mask that no longer changes leaves out exactly what it closes.
    """

    def __init__(self, entries_of: EntriesOf) -> None:
        self.entries: Mapping[str, OpenEntries] = {}
        self._entries_of = entries_of
        self._left_out: Tensor | None = None
        self._looks = 0

    def leave_out(self, units: Tensor) -> None:
        """Compute all but some units, bool ``(n_units,)``, from here on."""
        if self._left_out is None or not torch.equal(units, self._left_out):
            self._left_out, self._bounds = units, torch.where(units, -FAR, math.inf)
            self.entries = self._entries_of(~units)

    def look(self, exponent: Tensor) -> None:
        """Follow a gate that learns."""
        if exponent.device.type != "cpu":  # all is computed: an accelerator would have to be waited for in every step
            return
        turn, self._looks = self._looks % EVERY == 0, self._looks + 1
        if turn or (self.entries and bool((exponent > self._bounds).any())):  # one of them came back
            self.leave_out(exponent < -FAR)


class Gate:
    """Soft mask ``a = σ(s · e)`` over the units of all layers, cut into layers that are leaves of autograd.

    Gradients collect in the leaves over every forward until the gate is opened again: the way from there to the
    embedding is short enough to be gone by hand, once per step.

    In the leaves a gate up to :data:`SHUT` is exactly 0. A learned embedding closes units at 1e-20 and less for most of
    an epoch: activations and gradients times that fall below the smallest normal float, with which common processors
    compute several times as slowly. The embedding's own gradient and the regulariser are taken at the exact ``a``.
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
        self.open(1.0)

    @torch.no_grad()
    def open(self, scale: float, *, learns: bool = True) -> Tensor:
        """Set the gate ``a``, ``(n_units,)``, to a scale ``s``; where it ``learns`` its leaves collect gradients."""
        if not learns and scale == self._fixed_at:
            return self.value
        torch.mul(self.embedding, scale, out=self._exponent)
        if learns:
            self._computed.look(self._exponent)
        torch.sigmoid(self._exponent, out=self.value)
        torch.threshold(self.value, SHUT, 0.0, out=self._read)
        if not learns:
            self._computed.leave_out(~(self._read > 0))
        self._fixed_at, self.leaves.entries = None if learns else scale, self._computed.entries
        for leaf in self.leaves.values():
            leaf.grad = None
            leaf.requires_grad_(learns)
        return self.value

    def reread(self) -> None:
        """Let the next :meth:`open` read the embedding again: values were loaded."""
        self._computed = ComputedUnits(self._entries_of)
        self._fixed_at = None

    def gradient(self) -> Tensor:
        """``∂loss/∂a``, ``(n_units,)``; zero for layers that no backward pass reached, and units not computed."""
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves.values()])

    def open_units(self) -> Tensor:
        """``a > 0.5``, bool ``(n_units,)``."""
        return self.embedding.detach() > 0  # σ(s·e) > ½ at every scale
