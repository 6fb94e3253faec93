"""Store of runs: every state that a training or an unlearning leads to, computed once, whichever run asks for it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from filelock import FileLock

from avalanche_amnesia.audit.record import UnlearningRecord, package_versions
from avalanche_amnesia.benchmarks.data import few_samples, labels_fingerprint
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.lab.runs.behaviour import facts_of, script_code
from avalanche_amnesia.lab.runs.first_batches import NotRepeatableError, first_batches
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving.files import BLOB, STATE, Parts, read_body, read_state, write_state, writing
from avalanche_amnesia.saving.values import StateError
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.rollback import Contents, of_anybody
from avalanche_amnesia.training.host.saving import encoded_state, give_state
from avalanche_amnesia.unit_graph.masked_backbone import MaskedBackbone
from avalanche_amnesia.unlearning.assumptions import hooks_of

_STEPS = 3
"""First mini-batches of a training that tell it from others."""


@dataclass(frozen=True)
class Node:
    """One state in a store.

    Attributes:
        key: hash of all that it depends on; of the end of a logged run that of its settings and numbers.
        parent: key of the state before it; empty for the end of a logged run.
        trained: tasks that were trained on the way to it, in order.
        step: what leads to it from its parent: ``train 3`` or ``unlearn 0, 2``.
        seconds: that the step took.
        nbytes: of its own file; tensors are shared between nodes.
        used: when it was written or last used, seconds since the epoch.
    """

    key: str
    parent: str
    trained: tuple[int, ...]
    step: str
    seconds: float
    nbytes: int
    used: float


class RunStore:
    """A directory of states, one per training or unlearning, shared by all runs, references and processes.

    The key of a state is a hash of the state before it and of the step: the strategy as it was built (method, settings,
    initial weights, seed), versions of the packages, code and values of the user's parts, and the task's samples, first
    mini-batches and requests. A state is written as a whole or not at all, under a lock of the file system
    (``fcntl``), so that several processes compute none twice.

    It holds models that know every task. To erase one, prune it (:meth:`prune`).

    Args:
        path: the directory, made if it does not exist; None: a temporary one, which goes with the process.
        keep: bytes that it may take: beyond that the states that were not used for longest go; None: no limit.

    Raises:
        StateError: if the directory holds anything else.
    """

    def __init__(self, path: str | Path | None = None, *, keep: int | None = None) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if path is None:  # a worker that was just ended may still write
            self._temporary = tempfile.TemporaryDirectory(prefix="amnesia-runs-", ignore_cleanup_errors=True)
            path = self._temporary.name
        self.path = Path(path)
        self.keep = keep
        ours = ("nodes", "blobs", "locks")
        foreign = [f.name for f in self.path.iterdir() if f.name not in ours] if self.path.is_dir() else []
        if foreign or self.path.is_file():
            raise StateError(f"{self.path} is no store of runs ({foreign[:3] or 'a file'}): give a new directory")
        with writing(self.path):
            for name in ours:
                (self.path / name).mkdir(parents=True, exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_temporary": None}  # another process opens the directory, and leaves it there

    def run(self, strategy: Strategy) -> StoredRun:
        """A run that begins with a strategy as it was built, and finds its states here or puts them here."""
        return StoredRun(self, strategy)

    def nodes(self) -> list[Node]:
        """All states, those that were used last in front."""
        found = []
        for folder in (self.path / "nodes").iterdir():
            try:
                body, _ = read_body(folder)
                status = (folder / STATE).stat()
            except (StateError, OSError):  # another process removes it, or was killed before it was whole
                continue
            node = body["node"]
            node["trained"] = tuple(node["trained"])
            found.append(Node(folder.name, **node, nbytes=status.st_size, used=status.st_mtime))
        return sorted(found, key=lambda node: -node.used)

    def nbytes(self) -> int:
        """Bytes that all files take."""
        size = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):  # another process prunes
                    size += os.stat(os.path.join(folder, name)).st_size
        return size

    def prune(self, keep: int | None = None, *, tasks: Collection[int] = (), spare: Collection[str] = ()) -> int:
        """Delete states, and the tensors that no other state names.

        Args:
            keep: bytes that may stay: the states that were not used for longest go; None: as many as there are.
            tasks: every state goes on whose way one of these was trained, unlearned later or not.
            spare: keys of states that stay.

        Returns:
            Bytes that were freed.

        Raises:
            ValueError: if neither ``keep`` nor ``tasks`` says what may go.
        """
        if keep is None and not tasks:
            raise ValueError("say what may go: keep=0 for every state, keep=500_000_000 for the oldest, tasks=[2]")
        with self.lock("store"):
            before = self.nbytes()
            stay = [node for node in self.nodes() if node.key in spare or not set(node.trained) & set(tasks)]
            parts = {node.key: set(read_body(self._folder(node.key))[1].values()) for node in stay}
            size = {file.name: file.stat().st_size for file in (self.path / "blobs").iterdir()}
            named_by = Counter(name for names in parts.values() for name in names)
            total = sum(size[name] for name in named_by) + sum(node.nbytes for node in stay)
            for node in [node for node in reversed(stay) if node.key not in spare]:  # the oldest first
                if keep is None or total <= keep:
                    break
                stay.remove(node)
                named_by -= Counter(parts[node.key])
                total -= node.nbytes + sum(size[name] for name in parts[node.key] if name not in named_by)
            keys = {node.key for node in stay}
            for folder in (self.path / "nodes").iterdir():
                if folder.name not in keys:
                    (folder / STATE).unlink(missing_ok=True)
                    shutil.rmtree(folder)
            for file in (self.path / "blobs").iterdir():  # last: killed in between, no state lacks any
                if BLOB.fullmatch(file.name) and file.name not in named_by:
                    file.unlink()
            return before - self.nbytes()

    # For a run ------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Tell whether a state is there."""
        return (self._folder(key) / STATE).is_file()

    def read(self, key: str) -> tuple[dict[str, Any], Parts]:
        """A state; it counts as used now."""
        os.utime(self._folder(key) / STATE)
        return read_state(self._folder(key), self.path / "blobs")

    def files(self, key: str) -> tuple[dict[str, Any], dict[str, Path]]:
        """Body of a state, and the files of its parts by their places in it."""
        body, names = read_body(self._folder(key))
        return body, {place: self.path / "blobs" / name for place, name in names.items()}

    def write(self, key: str, body: Mapping[str, Any], parts: Parts) -> None:
        """Put a state in, and delete others where that takes the store beyond its limit."""
        with self.lock("store"):  # nobody sweeps while files are there that no state names yet
            write_state(self._folder(key), body, parts, self.path / "blobs")
        if self.keep is not None and self.nbytes() > self.keep:
            self.prune(self.keep, spare=[key])

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Lock of a state that is computed, or of the store; it ends with its process, however that ends."""
        lock = FileLock(self.path / "locks" / name)
        with writing(self.path):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _folder(self, key: str) -> Path:
        return self.path / "nodes" / key


@dataclass(frozen=True)
class _Step:
    """One training or unlearning of a run: key of the state that it leads to, and how."""

    key: str
    parent: str
    name: str
    trained: tuple[int, ...]
    do: Callable[[], Any]


class StoredRun:
    """A path through a store: trains and unlearns where no state is there yet, and takes it from there where it is.

    Where a strategy holds what can't be saved (see :func:`~avalanche_amnesia.training.save_state`), a training is not
    repeatable, or somebody changed the strategy between two steps, that is told once, and its states from there on are
    this run's only.

    Args:
        store: for its states.
        strategy: as it was built; from here on the run's own.

    Attributes:
        computed: steps that this run computed itself; all others were there.
    """

    def __init__(self, store: RunStore, strategy: Strategy) -> None:
        self._store, self._strategy = store, strategy
        self._fresh: Any = None
        self._path: list[_Step] = []
        self._seconds: dict[str, float] = {}
        self._data: dict[tuple[int, str], tuple[Any, str]] = {}
        self.computed = 0
        try:
            self._fresh = deepcopy(encoded_state(strategy))  # its tensors are the strategy's own
        except StateError as error:
            self._tell(error)
        self._root = self._held = _root_key(strategy, self._fresh)
        self._facts = facts_of(strategy)

    @property
    def stored(self) -> bool:
        """False: the strategy's states can't be saved or shared, and are this run's only."""
        return self._fresh is not None

    @property
    def key(self) -> str:
        """Key of the state at which the run stands."""
        return self._path[-1].key if self._path else self._root

    @property
    def trained(self) -> tuple[int, ...]:
        """Tasks that were trained so far, in order, whether unlearned later or not."""
        return self._path[-1].trained if self._path else ()

    @property
    def strategy(self) -> Any:
        """The strategy, in the state at which the run stands."""
        if self._held != self.key:
            self._settle()
        return self._strategy

    def restart(self) -> None:
        """Go back to the strategy as it was built; a StateError where its states can't be saved."""
        if self._path and not self.stored:
            raise StateError("the states of this run are not stored, so it can't go back: build the strategy again")
        self._path = []

    def train(self, experience: Any, **options: Any) -> None:
        """Train a task, with the requests that its experience carries.

        Args:
            experience: of the strategy's stream.
            options: of ``strategy.train``.
        """
        self._go(
            key=self._key_of_training(self.key, experience, options),
            name=f"train {experience.task_label}",
            do=lambda: self._train(experience, options),
            trained=(int(experience.task_label),),
        )

    def _train(self, experience: Any, options: Mapping[str, Any]) -> None:
        before = set(script_code([experience.dataset]))
        self._strategy.train(experience, **options)
        changed = sorted(before ^ set(script_code([experience.dataset])))
        if self.stored and changed:  # a run that took this task from the store would train the next one on other data
            self._fresh = None
            self._tell(f"the training is not repeatable: it changed {changed[0].rsplit(' ', 1)[0]} in its data set")

    def unlearn(self, tasks: Iterable[int], **options: Any) -> UnlearningRecord:
        """Unlearn tasks.

        Args:
            tasks: as for ``strategy.unlearn``.
            options: of ``UnlearningPlugin.unlearn``.

        Returns:
            The record; of a state that was there already, the one of its own unlearning.

        Raises:
            RequestError: if the strategy does not unlearn, or not these tasks now; the run stays where it is.
        """
        tasks = sorted(tasks)
        if unlearning_of(self._strategy) is None:
            raise RequestError(
                f"{type(self._strategy).__name__} does not unlearn: give it plugins=[TrajectoryPlugin(), "
                "UnlearningPlugin()], or use AmnesiacHAT or WSN"
            )
        self._go(
            key=_digest([self.key, {"unlearn": tasks, "options": _told(options)}]),
            name=f"unlearn {', '.join(map(str, tasks))}",
            do=lambda: unlearning_of(self._strategy).unlearn(self._strategy, tasks, **options),
        )
        record: UnlearningRecord = unlearning_of(self.strategy).records[-1]
        return record

    def seconds(self) -> float:
        """Seconds that the last step took, when it was computed."""
        if self.key not in self._seconds:
            with suppress(StateError):
                return float(self._store.files(self.key)[0]["node"]["seconds"])
            self._settle()  # another process has deleted it
        return self._seconds[self.key]

    def keys_of(self, experiences: Iterable[Any], **options: Any) -> list[str]:
        """Keys of the states that training some tasks from the beginning would lead to; computes nothing."""
        keys: list[str] = []
        for experience in experiences:
            keys.append(self._key_of_training(keys[-1] if keys else self._root, experience, options))
        return keys

    def _key_of_training(self, parent: str, experience: Any, options: Mapping[str, Any]) -> str:
        told = _told(options)
        which = id(experience), repr(told)
        if self.stored and which not in self._data:
            data = [*_facts_of_data(experience), *self._first_batches(experience, options)]
            self._data[which] = experience, _digest(data)
        if not self.stored:
            return os.urandom(16).hex()
        step = {"train": int(experience.task_label), "data": self._data[which][1], "options": told}
        return _digest([parent, step])

    def _first_batches(self, experience: Any, options: Mapping[str, Any]) -> list[Any]:
        """Return hashes of a training's first mini-batches; share nothing more if they are not repeatable."""
        self._leave_if_changed()
        if not self.stored:
            return []
        try:
            return first_batches(self._strategy, experience, _STEPS, **options)
        except NotRepeatableError as error:
            self._leave(str(error))
            return []

    def _go(self, key: str, name: str, do: Callable[[], Any], trained: tuple[int, ...] = ()) -> None:
        self._leave_if_changed()
        # What is this run's only has a key that nobody else can have.
        key = key if self.stored else os.urandom(16).hex()
        self._path.append(_Step(key, self.key, name, (*self.trained, *trained), do))
        try:
            if not (self.stored and self._store.has(key)):
                self._settle()
        except BaseException:
            self._path.pop()
            raise

    def _leave_if_changed(self) -> None:
        """Share nothing more once the strategy is not as the run left it: no key holds what somebody else did to it."""
        if not self.stored or not self._held:
            return
        now = facts_of(self._strategy)
        changed = [name for name in self._facts | now if self._facts.get(name) != now.get(name)]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self._leave(f"between two steps somebody changed {', '.join(changed[:3])}{more}")

    def _leave(self, reason: str) -> None:
        if self._held != self.key:
            self._settle()
        self._fresh = None
        self._tell(reason)

    def _settle(self) -> None:
        """Bring the strategy to where the run stands: from the last state that is there, computing the rest."""
        ahead: list[_Step] = []
        for step in reversed(self._path):
            if self._held == step.key or self._takes(step.key):
                break
            ahead.append(step)
        else:
            if self._held != self._root:
                if not self.stored:
                    raise StateError("a step of this run failed, and no state is stored: build the strategy again")
                self._go_to_root()
        for step in reversed(ahead):
            with self._store.lock(step.key):
                if not self._takes(step.key):  # another process may have computed it meanwhile
                    self._compute(step)

    def _go_to_root(self) -> None:
        self._held = ""  # interrupted, the strategy is in no state
        give_state(self._strategy, partial(deepcopy, self._fresh), self._store.path)
        self._stands_at(self._root)

    def _takes(self, key: str) -> bool:
        """Give the strategy a state of the store, if it is there and whole."""
        if not self.stored or not self._store.has(key):
            return False
        self._held = ""

        def read() -> Any:
            body, tensors = self._store.read(key)
            self._seconds.setdefault(key, float(body["node"]["seconds"]))
            return body, tensors

        try:
            give_state(self._strategy, read, self._store.path)
        except StateError as error:
            warnings.warn(f"{error}; that state is computed again", stacklevel=5)
            return False
        self._stands_at(key)
        return True

    def _stands_at(self, key: str) -> None:
        self._held, self._facts = key, facts_of(self._strategy)

    def _compute(self, step: _Step) -> None:
        started = perf_counter()
        self._held = ""  # whatever interrupts the step: where it began is read again
        step.do()
        self._stands_at(step.key)
        self._seconds[step.key] = perf_counter() - started
        self.computed += 1
        if self.stored:
            try:
                body, parts = encoded_state(self._strategy)
            except StateError as error:
                self._fresh = None
                self._tell(error)
                return
            node = {"parent": step.parent, "trained": step.trained, "step": step.name}
            self._store.write(step.key, {**body, "node": {**node, "seconds": self._seconds[step.key]}}, parts)

    def _tell(self, error: StateError | str) -> None:
        warnings.warn(f"the states of this run are not stored: {error}", stacklevel=6)


def _facts_of_data(experience: Any) -> list[Any]:
    """An experience's samples, the code that makes them, its requests, and the tasks of its stream.

    Inputs count as an evaluation sees them: all of them where they lie in memory, else a few, evenly spread.
    """
    contents = Contents([experience], [], of_anybody)  # a counter of a data set's own counts trainings only
    found = getattr(experience, "tensors_at", lambda where: None)(None)
    inputs = few_samples(experience) if found is None else found[0]
    contents.go_back()
    stream = getattr(experience, "origin_stream", None) or [experience]
    return [
        labels_fingerprint(experience),
        tensor_hash(inputs),
        script_code([experience.dataset]),
        repr(tuple(getattr(experience, "requests", ()))),
        repr(getattr(experience, "left_out", ())),
        repr(getattr(experience, "deadline", None)),
        [(int(e.task_label), bool(getattr(e, "permanent", False)), len(e.dataset)) for e in stream],
    ]


def _root_key(strategy: Strategy, state: Any) -> str:
    """Hash of a strategy as it was built, of the versions that it runs on, and of the code that it was given."""
    if state is None:
        return os.urandom(16).hex()
    body, parts = state
    held = {place: part.digest for place, part in parts.items()}
    return _digest([{**body, "metrics": []}, held, package_versions(), strategy.device.type, *_code_of(strategy)])


def _code_of(strategy: Strategy) -> list[Any]:
    """Code of a strategy, its networks, plugins, loss and hooks, and the networks' own graphs."""
    skip = [strategy, strategy.model, strategy.optimizer, strategy.evaluator]
    hooks = [hook for _, several in hooks_of(strategy) for hook in several]
    parts = [strategy.optimizer, strategy._criterion, *strategy.plugins, *strategy.model.modules()]
    traced = [part for part in parts if isinstance(part, MaskedBackbone)]
    graphs = [backbone.code(training) for backbone in traced for training in (False, True)]  # heads are fitted to both
    return [script_code([strategy, *parts, *hooks], skip), graphs]


def _told(options: Mapping[str, Any]) -> dict[str, str]:
    return {n: repr(script_code([v]) if callable(v) else v) for n, v in sorted(options.items())}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
