"""A task's own norms in a backbone that is not traced: copies that stand in for the backbone's while it runs."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia.models.substitutes import Place

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Classes of norms of which a task can have copies."""


def norms_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Norms of a backbone that have parameters or running statistics, by name."""
    return {
        name: module for name, module in backbone.named_modules() if isinstance(module, NORMS) and module.state_dict()
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
