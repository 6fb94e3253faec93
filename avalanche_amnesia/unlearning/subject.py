"""Subject of an unlearning, all that it looks at and changes, and the check that all of it can be cleaned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.audit.record import Provenance
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.claims import Claims
from avalanche_amnesia.unlearning.compensation import Compensation
from avalanche_amnesia.unlearning.purging.learned_state import UnknownStateError, cleaned_anyway, learned_state
from avalanche_amnesia.unlearning.purging.registry import adapter_of
from avalanche_amnesia.unlearning.repair import Repair


@dataclass
class Subject:
    """Everything that an unlearning looks at and changes.

    Attributes:
        model: the model.
        optimizers: whose state and parameter lists are cleaned.
        trajectory: the tasks' updates.
        ledger: who may be asked for.
        plugins: the host's plugins, and the host itself, to be purged.
        compensations: what makes up to the remaining tasks.
        repair: what trains the affected tasks again afterwards; None: nothing does.
        counters: task → the host's experience counter when it was trained.
        before: values before a task that is in training, by parameter name; None between tasks. Replaced in place.
        optimized: the host's own table of optimized parameters, by name; cleaned too.
        claims: what trainings could see, and under which circumstances.
        strategy: the host itself.
        known: every task of the stream, None where that is not known.
        unrecorded: tasks that the model has and the ledger does not know: it was loaded with them.
        iteration: training iterations finished.
        in_training: the task in whose training the request fires; None between tasks.
        others: what else belongs to the host and is cleaned elsewhere: its evaluator, this package's plugins.
        provenance: for the record.
        rearrange: moves the remaining tasks' units together, once the tasks are out; None: units stay where they are.
        moved_without: from tasks that are to go to the remaining ones whose units it would move.
        shared_state: tensors beside the parameters that trainings changed for all tasks together.
        opened_whole: task → layers whose mask says nothing of it, because the task opened all that it could (a pool).
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    trajectory: Trajectory
    ledger: TaskLedger
    plugins: Sequence[object]
    compensations: Sequence[Compensation]
    counters: Mapping[int, int]
    before: dict[str, Tensor] | None
    optimized: dict[str, Any] | None
    claims: Claims
    strategy: Any
    known: frozenset[int] | None = None
    unrecorded: frozenset[int] = frozenset()
    iteration: int = 0
    in_training: int | None = None
    others: Sequence[object] = ()
    provenance: Provenance = field(default_factory=lambda: Provenance("unknown"))
    repair: Repair | None = None
    rearrange: Callable[[Transaction], None] | None = None
    moved_without: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    opened_whole: Mapping[int, Collection[str]] = field(default_factory=dict)
    shared_state: Collection[str] = ()

    def in_training_without(self, tasks: Iterable[int]) -> bool:
        """Tell whether a task is in training in which none of these can have left a trace."""
        return self.before is not None and not self.claims.influences & set(tasks)


UnknownState = Sequence[tuple[object, str]]
"""Plugins, or the strategy, with the path to something learned that nobody knows how to clean."""


def unknown_state(subject: Subject) -> UnknownState:
    """Plugins (or the strategy) that keep something learned and have no adapter, with the path to what they keep."""
    known = [*cleaned_anyway(subject.model), *subject.optimizers, *subject.plugins, *subject.others]
    paths = ((p, learned_state(p, known)) for p in subject.plugins if adapter_of(p) is None)
    return [(plugin, path) for plugin, path in paths if path is not None]


def refuse_unknown_state(unknown: UnknownState) -> None:
    """Raise if something keeps learned state that nobody knows how to clean.

    Args:
        unknown: what :func:`unknown_state` found; it walks over all that plugins hold, and is asked once.

    Raises:
        UnknownStateError: naming all of it.
    """
    if unknown:
        names = ", ".join(f"{type(plugin).__name__} (in its {path})" for plugin, path in unknown)
        first = type(unknown[0][0]).__name__
        raise UnknownStateError(
            f"nothing was changed: state that was learned is kept in {names}, and nobody knows how to clean it of a "
            f"task. Write a function (plugin, context, change) -> str under @register_purger({first}), or leave it "
            "as it is with allow_unknown=True, which the record then says (plan.unpurged)"
        )
