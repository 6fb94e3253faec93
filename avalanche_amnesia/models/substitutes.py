"""Substitutes for a backbone's own tensors and norms while it runs, untraced; copies of norms for each task."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Place = tuple[dict[str, Any], str]
"""Holder of something (a module's ``_parameters``, ``_buffers`` or attributes), and the name that it has there."""
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Classes of norms of which a task can have copies."""


class Substitutes:
    """Substitutes of one forward, and the way back.

    The backbone's own things are noted before the first of them is replaced: a forward that was interrupted while it
    put them back leaves nothing in their place for good.
    """

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def put(self, others: Sequence[tuple[Place, Any]]) -> Iterator[None]:
        """Put things into their places, for the length of a block."""
        self.take_back()
        self._own = [(*place, place[0][place[1]]) for place, _ in others]
        try:
            for (holder, name), other in others:
                holder[name] = other
            yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Put the backbone's own things back, where a block was left without that."""
        for holder, name, value in self._own:
            holder[name] = value
        self._own = []


def norms_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Norms of a backbone that tasks change, by name: they have parameters that learn, or running statistics."""
    return {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, NORMS) and (any(p.requires_grad for p in module.parameters()) or [*module.buffers()])
    }


class NormCopies:
    """Norms of a backbone as prototypes, which nobody trains, of the copies that its tasks run through."""

    def __init__(self, prototypes: Sequence[nn.Module]) -> None:
        self.prototypes = list(prototypes)
        self._learned = [p.requires_grad for norm in self.prototypes for p in norm.parameters()]
        for norm in self.prototypes:
            norm.requires_grad_(False)

    def begun(self) -> list[nn.Module]:
        """Copies for a task that begins, with the prototypes' values."""
        copies = [deepcopy(norm) for norm in self.prototypes]
        self.set_trainable(copies, True)
        return copies

    def set_trainable(self, copies: Iterable[nn.Module], learn: bool) -> None:
        """Let copies receive gradients, or not; what the backbone's maker had frozen never does."""
        parameters = [parameter for norm in copies for parameter in norm.parameters()]
        for parameter, learned in zip(parameters, self._learned, strict=True):
            parameter.requires_grad_(learn and learned)

    def hold(self) -> None:
        """Put the prototypes into evaluation mode: where they run themselves, they stay as they are."""
        for norm in self.prototypes:
            norm.eval()

    def standing_in(self, copies: Iterable[nn.Module], *, learn: bool = True) -> list[tuple[Place, Any]]:
        """Substitutes during a forward: parameters, statistics and mode of a task's copies."""
        found: list[tuple[Place, Any]] = []
        for prototype, copy in zip(self.prototypes, copies, strict=False):
            found += [((vars(prototype), name), vars(copy)[name]) for name in ("_parameters", "_buffers")]
            found.append(((vars(prototype), "training"), copy.training and learn))
        return found
