"""Ledger (list of trained, permanent and unlearned tasks), and the rules for requests to unlearn tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from avalanche_amnesia import checks
from avalanche_amnesia.saving.values import StateError, checked


class RequestError(ValueError):
    """Error raised, before any change, if an unlearning request, a training or a deadline is not allowed."""


@dataclass(frozen=True)
class _Entry:
    """Ledger row of a task: index of its training, whether declared permanent, and tasks it may have learned from."""

    order: int
    declared: bool
    saw: frozenset[int]


class TaskLedger:
    """List of trained, permanent (never to be unlearned) and unlearned tasks; checks requests to unlearn against it.

    Attributes:
        deadline: number of further trained tasks after which a task becomes permanent; None: no deadline.
        n_trained: number of finished trainings; a task trained twice counts twice.
        unlearned: the unlearned tasks, in the order of unlearning.
    """

    # Attributes are replaced, never changed in place, so requests can be tried on a shallow copy.

    def __init__(self, deadline: int | None = None) -> None:
        number = checks.integer(deadline)
        if deadline is not None and (number is None or number < 1):
            raise RequestError(
                f"deadline={deadline!r} is not allowed: give the number of further tasks (an int of at "
                f"least 1) after which a task becomes permanent, or None for no deadline"
            )
        self.deadline, self.n_trained = number, 0
        self.unlearned: tuple[int, ...] = ()
        self._entries: dict[int, _Entry] = {}

    @property
    def remaining(self) -> tuple[int, ...]:
        """Return the tasks trained and not unlearned, in training order."""
        return tuple(self._entries)

    @property
    def permanent(self) -> frozenset[int]:
        """Return the permanent tasks, which can't be unlearned: declared permanent, or past their deadline."""
        return frozenset(task for task, entry in self._entries.items() if entry.declared or self._is_expired(entry))

    @property
    def unlearnable(self) -> tuple[int, ...]:
        """Return the tasks that a request may unlearn now, in training order."""
        permanent = self.permanent
        return tuple(task for task in self._entries if task not in permanent)

    def saw(self, task: int) -> frozenset[int]:
        """Return the tasks that ``task`` may have learned from; raise RequestError if it is untrained or unlearned."""
        if task not in self._entries:
            raise RequestError(f"saw({task!r}): this task does not remain; remaining are {_as_text(self.remaining)}")
        return self._entries[task].saw

    def learn(self, task: int, permanent: bool = False, saw: Collection[int] | None = None) -> None:
        """Record a task's finished training; ``saw``: tasks it may have learned from (None: all not unlearned)."""
        label = checks.integer(task)
        if label is None:
            raise RequestError(f"training of task {task!r}: a task is an int, not {type(task).__name__}")
        if label in self._entries:
            raise RequestError(
                f"training of task {task}: it is already trained and still remains; only a task that was "
                f"unlearned may be learned again"
            )
        seen = frozenset(self._entries) if saw is None else frozenset(saw) & self._entries.keys()
        self.unlearned = tuple(other for other in self.unlearned if other != label)
        self._entries = {**self._entries, label: _Entry(self.n_trained, bool(permanent), seen)}
        self.n_trained += 1

    def declare_permanent(self, tasks: Iterable[int]) -> None:
        """Mark trained tasks as permanent (never to be unlearned). It is irreversible; repeating it has no effect."""
        declared = checks.integers("declaring permanent: tasks", tasks, "tasks", RequestError)
        for task in declared:
            if task not in self._entries:
                raise RequestError(
                    f"declaring permanent: task {task} does not remain; remaining are {_as_text(self.remaining)}"
                )
        self._entries = self._entries | {task: replace(self._entries[task], declared=True) for task in declared}

    def check(
        self,
        tasks: Iterable[int],
        event: str,
        known: Collection[int] | None = None,
        unrecorded: Collection[int] = (),
    ) -> tuple[int, ...]:
        """Check that ``tasks`` can be unlearned, and return them as ints; else RequestError. Change nothing."""
        request = checks.integers(f"{event}: tasks", tasks, "tasks", RequestError)
        if not request:
            raise RequestError(f"{event}: the request is empty; name at least one task or leave the request out")
        for task in request:
            if request.count(task) > 1:
                raise RequestError(f"{event}: task {task} is named more than once; name each task once")
            broken = self._broken_rule(task, known, unrecorded)
            if broken is not None:
                raise RequestError(
                    f"{event}: task {task} can't be unlearned: {broken}; "
                    f"unlearnable at this moment are {_as_text(self.unlearnable)}"
                )
        return request

    def forget(
        self,
        tasks: Iterable[int],
        event: str = "unlearning request",
        known: Collection[int] | None = None,
    ) -> tuple[int, ...]:
        """Mark ``tasks`` as unlearned and return them; if one can't be unlearned, raise RequestError and mark none."""
        request = self.check(tasks, event, known)
        self._entries = {task: entry for task, entry in self._entries.items() if task not in request}
        self.unlearned = (*self.unlearned, *request)
        return request

    def state_dict(self) -> dict[str, Any]:
        """Return the whole ledger as a dictionary of JSON types."""
        rows = [{"task": task, **vars(entry), "saw": sorted(entry.saw)} for task, entry in self._entries.items()]
        facts = {"deadline": self.deadline, "n_trained": self.n_trained}
        return {**facts, "remaining": rows, "unlearned": list(self.unlearned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, which replaces the whole ledger, deadline included."""
        kinds = {"n_trained": int, "remaining": list[dict[str, Any]], "unlearned": list[int]}
        deadline, n_trained, remaining, unlearned = checked(state, deadline=int | None, **kinds)
        entries = {}
        for row in remaining:
            task, order, declared, saw = checked(row, task=int, order=int, declared=bool, saw=list[int])
            entries[task] = _Entry(order, declared, frozenset(saw))
        if both := entries.keys() & unlearned:
            raise StateError(f"invalid value in state: tasks {sorted(both)} are both remaining and unlearned")
        self.deadline = TaskLedger(deadline).deadline
        self.n_trained, self._entries, self.unlearned = n_trained, entries, tuple(unlearned)

    def _is_expired(self, entry: _Entry) -> bool:
        return self.deadline is not None and self.n_trained - 1 - entry.order >= self.deadline

    def _broken_rule(self, task: int, known: Collection[int] | None, unrecorded: Collection[int]) -> str | None:
        if known is not None and task not in known:
            return f"it is unknown (known are {_as_text(sorted(known))})"
        entry = self._entries.get(task)
        if entry is None:
            if task in self.unlearned:
                return "it is already unlearned"
            if task in unrecorded:
                return "the model came with it (from a checkpoint, say), and what it changed was not recorded here"
            return "it is not yet trained"
        if entry.declared:
            return "it was declared permanent"
        if self._is_expired(entry):
            return f"its deadline has expired ({self.deadline} further tasks trained), which made it permanent"
        return None


def _as_text(tasks: Iterable[int]) -> str:
    return ", ".join(map(str, tasks)) or "none"
