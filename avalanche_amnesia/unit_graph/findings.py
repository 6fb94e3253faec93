"""Reasons why a backbone can't be masked, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

Fix = Callable[[nn.Module], None]


class ModelError(ValueError):
    """A backbone can't be masked; the message names the module or operation, the reason, and a way out."""


@dataclass(frozen=True)
class Finding:
    """A part of a backbone that has no masking rule.

    Attributes:
        where: the module, parameter or operation.
        reason: why it can't be masked.
        fix: what the user can do.
        change: the change by which :func:`~avalanche_amnesia.unit_graph.fix` fixes a model; None where it can't.
    """

    where: str
    reason: str
    fix: str
    change: Fix | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}; {self.fix}"


class Unsupported(Exception):
    """Raised by a rule for something that it can't mask.

    Args:
        reason: why it can't.
        fix: what the user can do.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix
