"""The soft mask through which a task in training is run (METHOD §2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class Gate:
    """``a = σ(s · e)`` over the units of all layers, cut into layers that are leaves.

    Gradients collect in the leaves over every forward until the gate is opened anew: the way from there to the
    embedding is short enough to be gone by hand, once per step.

    Args:
        embedding: ``e``, ``(n_units,)``.
        allowed: the units that may open, bool ``(n_units,)``; None: all of them.
        by_layer: cuts a vector over all units into views by layer.

    Attributes:
        value: ``a``, ``(n_units,)``.
        leaves: its layers, by name.
    """

    @torch.no_grad()
    def __init__(
        self, embedding: nn.Parameter, allowed: Tensor | None, by_layer: Callable[[Tensor], Mapping[str, Tensor]]
    ) -> None:
        self.embedding, self.allowed = embedding, allowed
        self.value = torch.empty_like(embedding)
        self.leaves = {name: part.requires_grad_() for name, part in by_layer(self.value).items()}
        self.open(1.0)

    @torch.no_grad()
    def open(self, scale: float) -> None:
        """Set the gate to a scale ``s``."""
        torch.mul(self.embedding, scale, out=self.value).sigmoid_()
        if self.allowed is not None:
            self.value.mul_(self.allowed)
        for leaf in self.leaves.values():
            leaf.grad = None

    def gradient(self) -> Tensor:
        """``∂loss/∂a``, ``(n_units,)``; zero for layers that no backward pass reached."""
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves.values()])

    def open_units(self) -> Tensor:
        """``a > 0.5``, bool ``(n_units,)``."""
        is_open = self.embedding.detach() > 0  # σ(s·e) > ½ at every scale
        return is_open if self.allowed is None else is_open & self.allowed
