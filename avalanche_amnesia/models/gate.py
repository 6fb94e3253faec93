"""The soft mask ``a = σ(s · e)`` of the task in training (HAT, Serrà et al., ICML 2018)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.computed_units import ComputedUnits, EntriesOf
from avalanche_amnesia.unit_graph.open_entries import LayerMasks

SHUT = 1e-12
"""The network reads a gate up to here as 0. Chosen by measurement: ``experiments/results/shut_gates.md``."""


class Gate:
    """Soft mask ``a = σ(s · e)`` over the units of all layers, cut into layers that are leaves of autograd.

    Gradients collect in the leaves over every forward until the gate is opened anew: the way from there to the
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
        allowed: Tensor | None,
        by_layer: Callable[[Tensor], Mapping[str, Tensor]],
        entries_of: EntriesOf,
    ) -> None:
        self.embedding, self.allowed = embedding, allowed
        self.value, self._read, self._exponent = (torch.empty_like(embedding) for _ in range(3))
        self.leaves = LayerMasks({name: part.requires_grad_() for name, part in by_layer(self._read).items()})
        self._entries_of = entries_of
        self.reread()
        self.open(1.0)

    @torch.no_grad()
    def open(self, scale: float, *, learns: bool = True) -> None:
        """Set the gate to a scale ``s``."""
        if not learns and scale == self._fixed_at:
            return
        if self._barred is None:
            torch.mul(self.embedding, scale, out=self._exponent)
        else:
            torch.add(self._barred, self.embedding, alpha=scale, out=self._exponent)
        if learns:
            self._computed.look(self._exponent)
        torch.sigmoid(self._exponent, out=self.value)
        torch.threshold(self.value, SHUT, 0.0, out=self._read)
        if not learns:
            self._computed.keep_to(self._read > 0)
        self._fixed_at, self.leaves.entries = None if learns else scale, self._computed.entries
        for leaf in self.leaves.values():
            leaf.grad = None
            leaf.requires_grad_(learns)

    def reread(self) -> None:
        """Let the next :meth:`open` read embedding and allowed units anew: values were loaded, or units have moved."""
        allowed = self.allowed
        self._barred = None if allowed is None else torch.where(allowed, 0.0, -torch.inf).to(self.embedding.dtype)
        self._computed = ComputedUnits(allowed, self._entries_of)
        self._fixed_at = None

    def gradient(self) -> Tensor:
        """``∂loss/∂a``, ``(n_units,)``; zero for layers that no backward pass reached, and units not computed."""
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves.values()])

    def open_units(self) -> Tensor:
        """``a > 0.5``, bool ``(n_units,)``."""
        is_open = self.embedding.detach() > 0  # σ(s·e) > ½ at every scale
        return is_open if self.allowed is None else is_open & self.allowed
