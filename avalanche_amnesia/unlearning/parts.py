"""Parts of a task: which samples a request names, which were forgotten before, and the data that is left."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from blake3 import blake3

from avalanche_amnesia.benchmarks.data import labels_fingerprint, targets_of
from avalanche_amnesia.benchmarks.requests import UnlearningRequest, check_part, experience_without
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving.values import checked


@dataclass
class ForgottenSamples:
    """Salted hashes of samples that remaining tasks were trained again without; no position can be read off a record.

    Attributes:
        salt: drawn with the first of them, and in no record.
        hashes: task → hashes of positions in its data.
    """

    salt: str = ""
    hashes: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def hashes_of(self, task: int, positions: Collection[int]) -> list[str]:
        """Hashes of positions in a task's data."""
        return [blake3(f"{self.salt}/{task}/{position}".encode()).hexdigest() for position in positions]

    def positions(self, task: int, n: int) -> list[int]:
        """Positions of a task's forgotten samples, of so many that it had."""
        there = self.hashes.get(task, frozenset())
        return [at for at, digest in enumerate(self.hashes_of(task, range(n))) if digest in there] if there else []

    def left_out(self, sizes: Mapping[int, int]) -> dict[int, list[int]]:
        """Task → :meth:`positions`, of tasks with so many samples each."""
        return {task: self.positions(task, sizes[task]) for task in sorted(self.hashes)}

    def salted(self) -> Self:
        """The same with a salt."""
        return self if self.salt else type(self)(secrets.token_hex(16), self.hashes)

    def having(self, task: int, hashes: Collection[str]) -> Self:
        """These, and further ones of a task."""
        return type(self)(self.salt, {**self.hashes, task: self.hashes.get(task, frozenset()) | set(hashes)})

    def without(self, tasks: Collection[int]) -> Self:
        """These without those of some tasks."""
        return type(self)(self.salt, {task: held for task, held in self.hashes.items() if task not in tasks})

    def state(self) -> dict[str, Any]:
        """All of it, as a value of a saved state."""
        return {"salt": self.salt, "hashes": dict(self.hashes)}

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Hashes and salt that :meth:`state` returned."""
        return cls(*checked(state, salt=str, hashes=dict[int, frozenset[str]]))


class LeftOut:
    """A request for a part of a task, checked against the task's data as it was given at first.

    It has ``hashes`` of the samples that go now, labels that are ``closed`` by that, and what is ``forgotten``, and the
    ``experience`` that is left, afterwards.
    """

    def __init__(
        self, forgotten: ForgottenSamples, task: int, request: UnlearningRequest, experience: Any, event: str
    ) -> None:
        labels = targets_of(experience).tolist()
        before, n = set(forgotten.positions(task, len(labels))), len(labels)
        there = {label for at, label in enumerate(labels) if at not in before}
        check_part(request, task, n, there, event)
        gone = {*request.samples, *(at for at, label in enumerate(labels) if label in request.classes)} - before
        if not gone:
            raise RequestError(f"{event}: all of these samples of task {task} are forgotten already")
        if len(gone) + len(before) == n:
            raise RequestError(f"{event}: task {task} would be left without samples: unlearn it as a whole, [{task}]")
        salted = forgotten.salted()
        self.hashes = tuple(sorted(salted.hashes_of(task, gone)))
        self.forgotten = salted.having(task, self.hashes)
        self.experience = experience_without(experience, gone | before)
        self.closed = tuple(label for label in self.experience.closed_classes if label in there)


class StreamInUse:
    """The stream of the last training, as long as somebody else holds it; in no copy that is pickled."""

    def __init__(self) -> None:
        self._held: Any = lambda: None

    def __reduce__(self) -> Any:
        return StreamInUse, ()

    def __deepcopy__(self, memo: Any) -> StreamInUse:
        twin = StreamInUse()
        twin._held = self._held
        return twin

    def note(self, experience: Any) -> None:
        """Remember an experience's stream."""
        self._held = weakref.ref(experience)

    def experience_of(self, task: int, given: Any, fingerprint: str, event: str) -> Any:
        """The experience with a task's data: the one that is given, else that of the stream; a RequestError if none."""
        last = self._held()
        found = [given] if given is not None else getattr(last, "origin_stream", None) or [last]
        of_task = [e for e in found if list(getattr(e, "task_labels", ())) == [task]]
        if not of_task:
            raise RequestError(
                f"{event}: task {task} is trained again, for which its data is needed: give its experience, "
                f"data=benchmark.train_stream[…]" + ("" if given is None else f", in the place of {given!r}")
            )
        same = next((e for e in of_task if labels_fingerprint(e) == fingerprint), None)
        if same is None:
            raise RequestError(
                f"{event}: this is not the data that task {task} was trained on, its labels differ; give the same "
                "experience, with all of its samples, in the same order"
            )
        return same
