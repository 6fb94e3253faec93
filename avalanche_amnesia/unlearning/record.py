"""What an unlearning would do (the plan) and what it did (the record), as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Claim = Literal["exact", "approximate"]


@dataclass(frozen=True)
class SharedEntries:
    """Entries that tasks which go had trained, and that stay because remaining tasks read them.

    Attributes:
        entries: how many, each counted once.
        tasks: the remaining tasks that read some of them, in training order.
    """

    entries: int
    tasks: tuple[int, ...]


@dataclass(frozen=True)
class UnlearningPlan:
    """What unlearning some tasks would change; making one changes nothing.

    Attributes:
        tasks: the tasks that go.
        event: when it was asked for, e.g. ``"after task 3"``.
        entries: shared tensor → number of entries that change.
        removed: tensors that go with the tasks (heads, masks, embeddings).
        affected: remaining tasks that use entries which change, in training order.
        compensated: those of them for which something was prepared that makes up for the loss.
        repaired: those of them that would be trained on samples of theirs.
        shared: shared tensor → the entries of it that keep what the tasks that go had trained, because remaining tasks
            read them (WSN); empty where their updates are taken out.
        claim: what the state afterwards can be called.
        trajectory_bytes: bytes of trajectory that are freed.
        purges: host plugins that would be cleaned, by class name.
        unpurged: plugins that hold learned state and have no purger, by class name.
    """

    tasks: tuple[int, ...]
    event: str
    entries: Mapping[str, int]
    removed: tuple[str, ...]
    affected: tuple[int, ...]
    compensated: tuple[int, ...]
    shared: Mapping[str, SharedEntries]
    claim: Claim
    trajectory_bytes: int
    purges: tuple[str, ...]
    unpurged: tuple[str, ...]
    repaired: tuple[int, ...] = ()


@dataclass(frozen=True)
class TensorChange:
    """One tensor that was touched; SHA-256 of its bits, None where it did not exist."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class RepairSummary:
    """What a repair did.

    Attributes:
        mode: ``joint``, ``sequential`` or ``sequential_adahat``.
        samples: repaired task → samples of it that the steps saw, in training order.
        steps: of the repair's own optimizers.
        entries: parameter → number of entries that the repair moved.
    """

    mode: str
    samples: Mapping[int, int]
    steps: int
    entries: Mapping[str, int]


@dataclass(frozen=True)
class UnlearningRecord:
    """What an unlearning did.

    Attributes:
        plan: what was planned and applied as a whole.
        changes: every model tensor that was touched, with hashes before and after.
        purged: what was taken out of host plugins and the optimizer, a line each.
        remaining: remaining tasks afterwards, in training order.
        n_trained: trainings finished when it happened.
        iteration: training iterations finished when it happened.
        seconds: wall-clock time it took.
        repair: what the repair did; None where there was none to do.
    """

    plan: UnlearningPlan
    changes: tuple[TensorChange, ...]
    purged: tuple[str, ...]
    remaining: tuple[int, ...]
    n_trained: int
    iteration: int
    seconds: float
    repair: RepairSummary | None = None

    @property
    def tasks(self) -> tuple[int, ...]:
        """The tasks that went."""
        return self.plan.tasks

    @property
    def affected(self) -> tuple[int, ...]:
        """Remaining tasks that use entries which changed."""
        return self.plan.affected

    @property
    def claim(self) -> Claim:
        """``exact``: equal to the reference model by construction; ``approximate`` otherwise."""
        return self.plan.claim

    def to_json(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the record to a JSON file."""
        Path(path).write_text(self.to_json() + "\n")
