"""A strategy as an unlearning sees it: all that it looks at and changes, and the check that all can be cleaned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.audit.record import Provenance
from avalanche_amnesia.contrib.repair.carry_out import Repair
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.object_walk import Parts
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.unlearning.compensation import Compensation
from avalanche_amnesia.unlearning.purging.learned_state import UnknownStateError, learned_state
from avalanche_amnesia.unlearning.purging.registry import purger_of


class Masking(Protocol):
    """The plugin that masks, as far as an unlearning deals with it."""

    @property
    def opened_whole(self) -> Mapping[int, Collection[str]]:
        """Task → layers whose mask says nothing of it, because the task opened all that it could (a pool)."""


@dataclass(frozen=True)
class Host:
    """A strategy as an unlearning sees it."""

    strategy: Any
    ledger: TaskLedger
    trajectory: Trajectory
    before: dict[str, Tensor] | None
    in_training: int | None
    plugins: Sequence[object]
    others: Sequence[object]
    masking: Masking | None
    compensations: Sequence[Compensation]
    repair: Repair | None
    counters: Mapping[int, int]
    provenance: Provenance
    known: frozenset[int] | None
    shared_state: Collection[str]

    @property
    def model(self) -> nn.Module:
        """The strategy's model."""
        model: nn.Module = self.strategy.model
        return model

    @property
    def optimizer(self) -> Optimizer:
        """The strategy's optimizer, whose state and parameter lists are cleaned."""
        optimizer: Optimizer = self.strategy.optimizer
        return optimizer

    @property
    def unrecorded(self) -> frozenset[int]:
        """Tasks that the model has and the ledger does not know: it was loaded with them."""
        return frozenset(getattr(self.model, "tasks", ())) - {*self.ledger.remaining, self.in_training}

    @property
    def opened_whole(self) -> Mapping[int, Collection[str]]:
        """Task → layers whose mask says nothing of it; see :class:`Masking`."""
        return {} if self.masking is None else self.masking.opened_whole


UnknownState = Sequence[tuple[object, str]]
"""Plugins, or the strategy, with the path to something learned that nobody knows how to clean."""


def unknown_state(host: Host) -> UnknownState:
    """Plugins (or the strategy) that keep something learned and have no purger, with the path to what they keep."""
    known = [host.optimizer, *host.plugins, *host.others]
    beside = Parts(host.model)
    paths = ((p, learned_state(p, known, beside)) for p in host.plugins if purger_of(p) is None)
    return [(plugin, path) for plugin, path in paths if path is not None]


def refuse_unknown_state(unknown: UnknownState) -> None:
    """Raise if something keeps learned state that nobody knows how to clean."""
    if unknown:
        names = ", ".join(f"{type(plugin).__name__} (in its {path})" for plugin, path in unknown)
        first = type(unknown[0][0]).__name__
        raise UnknownStateError(
            f"nothing was changed: state that was learned is kept in {names}, and nobody knows how to clean it of a "
            f"task. Write a function (plugin, context, change) -> str under @register_purger({first}), or leave it "
            "as it is with allow_unknown=True, which the record then says (plan.unpurged)"
        )
