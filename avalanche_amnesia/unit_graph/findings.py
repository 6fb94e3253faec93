"""Reasons why a backbone can't be masked, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

Mend = Callable[[nn.Module], None]


class ModelError(ValueError):
    """A backbone can't be masked; the message names the module or operation, the reason, and a way out."""


@dataclass(frozen=True)
class Finding:
    """One thing that has no masking rule.

    Attributes:
        where: the module, parameter or operation.
        reason: why it can't be masked.
        mend: what the user can do.
        mends: what :func:`~avalanche_amnesia.unit_graph.fix` does to a model about it; None where it can't.
    """

    where: str
    reason: str
    mend: str
    mends: Mend | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}; {self.mend}"


class Refused(Exception):
    """A rule met something that it can't mask."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(reason)
        self.reason, self.mend = reason, mend
