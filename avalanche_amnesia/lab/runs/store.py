"""Store of strategy states after trainings and unlearnings: runs share them, so each is computed only once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

from filelock import FileLock

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import UnlearningRecord, package_versions
from avalanche_amnesia.benchmarks.data import few_samples, labels_fingerprint
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.lab.runs.behaviour import facts_of, script_code
from avalanche_amnesia.lab.runs.first_batches import NotRepeatableError, first_batches, without_side_effects
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving.files import BLOB, STATE, Parts, explain_errors, read_body, read_state, write_state
from avalanche_amnesia.saving.values import StateError
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.saving import encoded_state, load_state_from
from avalanche_amnesia.unit_graph.masked_backbone import MaskedBackbone
from avalanche_amnesia.unlearning.assumptions import hooks_of, interceptors, patches, replaced_methods
from avalanche_amnesia.unlearning.texts import torch_settings

_STEPS = 3
"""Number of first mini-batches that enter the key of a training."""


@dataclass(frozen=True)
class Node:
    """A stored state of a strategy after one training or unlearning.

    Attributes:
        key: hash of everything that the state depends on.
        parent: key of the state before the step.
        trained: tasks trained on the way to this state, in order.
        step: step from the parent: ``train 3`` or ``unlearn 0, 2``.
        seconds: duration of the step.
        nbytes: size of the node's own file; nodes share files of tensors.
        used: time of the last write or read, in seconds since the epoch.
    """

    key: str
    parent: str
    trained: tuple[int, ...]
    step: str
    seconds: float
    nbytes: int
    used: float


class RunStore:
    """A directory of strategy states, one per training or unlearning, shared by all runs, references and processes.

    The key of a state is a hash of the state before it and of the step. It covers the new strategy (method, settings,
    initial weights, seed), package versions, code and plain values of the user's parts, and the task's samples, first
    mini-batches and requests. A state is written completely or not at all, under a file lock (``fcntl``), so that no
    state is computed twice by several processes.

    The stored models still know unlearned tasks. To erase a task, delete its states with :meth:`prune`.

    Args:
        path: the directory, created if missing; None: a temporary one, deleted with the process.
        keep: maximum number of bytes; least recently used states are deleted beyond it. None: no limit.

    Raises:
        StateError: the directory contains other files.
    """

    def __init__(self, path: str | Path | None = None, *, keep: int | None = None) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if path is None:  # ignore errors of the clean-up: a worker may still be writing
            self._temporary = tempfile.TemporaryDirectory(prefix="amnesia-runs-", ignore_cleanup_errors=True)
            path = self._temporary.name
        self.path, self.keep = Path(path), keep
        ours = ("nodes", "blobs", "locks")
        foreign = [f.name for f in self.path.iterdir() if f.name not in ours] if self.path.is_dir() else []
        if foreign or self.path.is_file():
            raise StateError(f"{self.path} is no store of runs ({foreign[:3] or 'a file'}): give a new directory")
        with explain_errors(self.path):
            for name in ours:
                (self.path / name).mkdir(parents=True, exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_temporary": None}  # a copy in another process must not delete it

    def run(self, strategy: Strategy) -> StoredRun:
        """Return an object that trains ``strategy`` and unlearns with it, or loads the result if this store has it."""
        return StoredRun(self, strategy)

    def nodes(self) -> list[Node]:
        """Return a :class:`Node` per state in the store, most recently used first."""
        found = []
        for folder in (self.path / "nodes").iterdir():
            try:
                body, _ = read_body(folder)
                status = (folder / STATE).stat()
            except (StateError, OSError):  # another process deletes it, or was killed while writing it
                continue
            node = {**body["node"], "key": folder.name, "trained": tuple(body["node"]["trained"])}
            found.append(Node(**node, nbytes=status.st_size, used=status.st_mtime))
        return sorted(found, key=lambda node: -node.used)

    def nbytes(self) -> int:
        """Return the size of all files of the store in bytes."""
        size = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):  # another process prunes
                    size += os.stat(os.path.join(folder, name)).st_size
        return size

    def prune(self, keep: int | None = None, *, tasks: Collection[int] = (), spare: Collection[str] = ()) -> int:
        """Delete the least recently used states beyond a size, states trained on given tasks, and unused tensors.

        Args:
            keep: maximum number of bytes left: the least recently used states are deleted first; None: no limit.
            tasks: delete every state with one of these tasks in its history, even if it was unlearned later.
            spare: keys of states that are never deleted.

        Returns:
            Number of freed bytes.

        Raises:
            ValueError: neither ``keep`` nor ``tasks`` is given.
        """
        tasks = checks.integers("tasks", tasks, "labels of tasks")
        if keep is None and not tasks:
            raise ValueError("say what may go: keep=0 for every state, keep=500_000_000 for the oldest, tasks=[2]")
        with self.lock("store"):
            before = self.nbytes()
            sizes = {file.name: file.stat().st_size for file in (self.path / "blobs").iterdir()}
            keys, named, total = set[str](), set[str](), 0
            for node in sorted(self.nodes(), key=lambda node: node.key not in spare):  # then the last used first
                if node.key not in spare and not set(node.trained).isdisjoint(tasks):
                    continue
                new = set(read_body(self._folder(node.key))[1].values()) - named
                total += node.nbytes + sum(sizes.get(name, 0) for name in new)
                if keep is not None and total > keep and node.key not in spare:
                    break
                keys.add(node.key)
                named |= new
            for folder in (self.path / "nodes").iterdir():
                if folder.name not in keys:
                    (folder / STATE).unlink(missing_ok=True)
                    shutil.rmtree(folder)
            for file in (self.path / "blobs").iterdir():  # last: an interruption leaves every state whole
                if BLOB.fullmatch(file.name) and file.name not in named:
                    file.unlink()
            return before - self.nbytes()

    def has(self, key: str) -> bool:
        """Return True if the store contains a state with this key."""
        return (self._folder(key) / STATE).is_file()

    def read(self, key: str) -> tuple[dict[str, Any], Parts]:
        """Load the state with this key, and set its time of last use to now."""
        os.utime(self._folder(key) / STATE)
        return read_state(self._folder(key), self.path / "blobs")

    def write(self, key: str, body: Mapping[str, Any], parts: Parts) -> None:
        """Store a state under a key, and delete the least recently used states if the store exceeds its limit."""
        with self.lock("store"):  # no pruning while new tensors are not yet part of a state
            write_state(self._folder(key), body, parts, self.path / "blobs")
        if self.keep is not None and self.nbytes() > self.keep:
            self.prune(self.keep, spare=[key])

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Lock a state or the store for a ``with`` block; the lock is also released if the process crashes."""
        lock = FileLock(self.path / "locks" / name, poll_interval=0.01)
        with explain_errors(self.path):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _folder(self, key: str) -> Path:
        return self.path / "nodes" / key


@dataclass(frozen=True)
class _Step:
    """One training or unlearning of a run, and the key of the resulting state."""

    key: str
    parent: str
    name: str
    trained: tuple[int, ...]
    do: Callable[[], Any]


class StoredRun:
    """A run of a strategy that loads each state from a store, and trains or unlearns only if the state is missing.

    The run warns once and stops sharing its states if the strategy cannot be saved (see
    :func:`~avalanche_amnesia.training.save_state`), a training is not repeatable, or the strategy was changed between
    two steps.

    Args:
        store: the store of its states.
        strategy: a new strategy; only the run may use it from now on.

    Attributes:
        computed: number of steps that this run computed itself instead of loading them.
    """

    def __init__(self, store: RunStore, strategy: Strategy) -> None:
        self._store, self._strategy = store, strategy
        self._fresh: Any = None
        self._path: list[_Step] = []
        self._seconds: dict[str, float] = {}
        self._data: dict[tuple[int, str], tuple[Any, str]] = {}
        self.computed = 0
        try:
            self._fresh = deepcopy(encoded_state(strategy))  # a copy, because its tensors are shared with the strategy
        except StateError as error:
            self._stop(error)
        self._root = self._loaded_key = _root_key(strategy, self._fresh)
        self._facts = facts_of(strategy)

    @property
    def stored(self) -> bool:
        """True if the run saves its states in the store, where other runs can load them."""
        return self._fresh is not None

    @property
    def key(self) -> str:
        """Key of the run's current state in the store."""
        return self._path[-1].key if self._path else self._root

    @property
    def trained(self) -> tuple[int, ...]:
        """Tasks trained so far, in training order, also tasks unlearned since."""
        return self._path[-1].trained if self._path else ()

    @property
    def strategy(self) -> Any:
        """The strategy in the run's current state."""
        if self._loaded_key != self.key:
            self._load_current()
        return self._strategy

    def restart(self) -> None:
        """Reset the run to the untrained strategy; raise StateError if the run took steps without storing states."""
        if self._path and not self.stored:
            raise StateError("the states of this run are not stored, so it can't go back: build the strategy again")
        self._path = []

    def train(self, experience: Any, **options: Any) -> None:
        """Train a task and process the experience's requests, or load the result if the store contains it.

        Args:
            experience: experience of the strategy's stream.
            options: options of ``strategy.train``.
        """
        self._do_step(
            key=self._key_of_training(self.key, experience, options),
            name=f"train {experience.task_label}",
            do=lambda: self._train(experience, options),
            trained=(int(experience.task_label),),
        )

    def _train(self, experience: Any, options: Mapping[str, Any]) -> None:
        before = set(script_code([experience.dataset], files=False))
        self._strategy.train(experience, **options)
        changed = sorted(before.difference(script_code([experience.dataset], files=False)))  # new values may be a cache
        if self.stored and changed:  # a run that loads this task would lack the change
            self._stop(f"the training is not repeatable: it changed {changed[0].rsplit(' ', 1)[0]} in its data set")

    def unlearn(self, tasks: Iterable[int], **options: Any) -> UnlearningRecord:
        """Unlearn tasks, or load the result if the store contains it.

        Args:
            tasks: tasks, as for ``strategy.unlearn``.
            options: options of ``UnlearningPlugin.unlearn``.

        Returns:
            The record; if the state was loaded, the record of the original unlearning.

        Raises:
            RequestError: the strategy cannot unlearn, or not these tasks now; the run's state is unchanged.
        """
        tasks = sorted(tasks)
        if unlearning_of(self._strategy) is None:
            raise RequestError(f"{type(self._strategy).__name__} does not unlearn: give it an UnlearningPlugin")
        self._do_step(
            key=_digest([self.key, {"unlearn": tasks, "options": script_code([dict(sorted(options.items()))])}]),
            name=f"unlearn {', '.join(map(str, tasks))}",
            do=lambda: unlearning_of(self._strategy).unlearn(self._strategy, tasks, **options),
        )
        record: UnlearningRecord = unlearning_of(self.strategy).records[-1]
        return record

    def seconds(self) -> float:
        """Return the seconds that the last step took when it was computed (not the seconds of loading it)."""
        if self.key not in self._seconds:
            with suppress(StateError):
                return float(read_body(self._store.path / "nodes" / self.key)[0]["node"]["seconds"])
            self._load_current()  # compute it again: another process has deleted it
        return self._seconds[self.key]

    def keys_of(self, experiences: Iterable[Any], **options: Any) -> list[str]:
        """Return, without training, the keys under which a new run's state after each experience would be stored."""
        keys = accumulate(experiences, lambda key, e: self._key_of_training(key, e, options), initial=self._root)
        return list(keys)[1:]

    def _key_of_training(self, parent: str, experience: Any, options: Mapping[str, Any]) -> str:
        which = id(experience), repr(told := script_code([dict(sorted(options.items()))]))
        if which not in self._data:
            self._stop_if_changed()
        if self.stored and which not in self._data:
            read = partial(_hash_data, self._strategy, experience, options)
            try:
                self._data[which] = experience, without_side_effects(read, self._strategy, experience, options)
            except NotRepeatableError as error:
                self._stop_sharing(str(error))
        if not self.stored:
            return os.urandom(16).hex()
        return _digest([parent, {"train": int(experience.task_label), "data": self._data[which][1], "options": told}])

    def _do_step(self, key: str, name: str, do: Callable[[], Any], trained: tuple[int, ...] = ()) -> None:
        self._stop_if_changed()
        key = key if self.stored else os.urandom(16).hex()  # a random key is never shared
        self._path.append(_Step(key, self.key, name, (*self.trained, *trained), do))
        try:
            if not (self.stored and self._store.has(key)):
                self._load_current()
        except BaseException:
            self._path.pop()
            raise

    def _stop_if_changed(self) -> None:
        """Stop storing this run's states if other code has changed the strategy, because keys ignore such changes."""
        if not self.stored or not self._loaded_key:
            return
        now = facts_of(self._strategy)
        if changed := [name for name in self._facts | now if self._facts.get(name) != now.get(name)]:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self._stop_sharing(f"between two steps other code changed {', '.join(changed[:3])}{more}")

    def _stop_sharing(self, reason: str) -> None:
        if self._loaded_key != self.key:
            self._load_current()
        self._stop(reason)

    def _stop(self, reason: StateError | str) -> None:
        """Stop storing this run's states for other runs, and warn with the reason."""
        self._fresh = None
        warnings.warn(f"the states of this run are not stored: {reason}", stacklevel=6)

    def _load_current(self) -> None:
        """Bring the strategy to the run's current state: load the last stored state, then run all later steps."""
        ahead: list[_Step] = []
        for step in reversed(self._path):
            if self._loaded_key == step.key or self._load_stored(step.key):
                break
            ahead.append(step)
        else:
            if self._loaded_key != self._root:
                if not self.stored:
                    raise StateError("a step of this run failed, and no state is stored: build the strategy again")
                self._loaded_key = ""  # after an interruption the strategy is in no known state
                load_state_from(self._strategy, partial(deepcopy, self._fresh), self._store.path)
                self._set_current(self._root)
        for step in reversed(ahead):
            with self._store.lock(step.key):
                if not self._load_stored(step.key):  # another process may have computed it meanwhile
                    self._compute(step)

    def _load_stored(self, key: str) -> bool:
        """Load the state with this key into the strategy; return False if the state is missing or broken."""
        if not self.stored or not self._store.has(key):
            return False
        self._loaded_key = ""

        def read() -> Any:
            body, tensors = self._store.read(key)
            if body["node"]["key"] != key:
                raise StateError(f"{self._store.path} has another state under the key {key}")
            self._seconds.setdefault(key, float(body["node"]["seconds"]))
            return body, tensors

        try:
            load_state_from(self._strategy, read, self._store.path)
        except StateError as error:
            warnings.warn(f"{error}; that state is computed again", stacklevel=5)
            return False
        self._set_current(key)
        return True

    def _set_current(self, key: str) -> None:
        self._loaded_key, self._facts = key, facts_of(self._strategy)

    def _compute(self, step: _Step) -> None:
        started = perf_counter()
        self._loaded_key = ""  # after an interruption the previous state is loaded again
        step.do()
        self._set_current(step.key)
        self._seconds[step.key] = perf_counter() - started
        self.computed += 1
        if self.stored:
            try:
                body, parts = encoded_state(self._strategy)
            except StateError as error:
                self._stop(error)
                return
            node = {"key": step.key, "parent": step.parent, "trained": step.trained, "step": step.name}
            self._store.write(step.key, {**body, "node": {**node, "seconds": self._seconds[step.key]}}, parts)


def _hash_data(strategy: Strategy, experience: Any, options: Mapping[str, Any]) -> str:
    """Return a hash of a training's data: samples, first mini-batches, data set code, unlearning requests, tasks.

    Inputs are read as in an evaluation: all inputs if they are in memory, else a few, evenly spaced.
    """
    found = getattr(experience, "tensors_at", lambda where: None)(None)
    stream = getattr(experience, "origin_stream", None) or [experience]
    facts = [
        labels_fingerprint(experience),
        [*map(tensor_hash, few_samples(experience) if found is None else found[:1])],
        script_code([experience.dataset]),
        repr(tuple(getattr(experience, "requests", ()))),
        repr(getattr(experience, "left_out", ())),
        repr(getattr(experience, "deadline", None)),
        [(int(e.task_label), bool(getattr(e, "permanent", False)), len(e.dataset)) for e in stream],
    ]
    return _digest([*facts, *first_batches(strategy, experience, _STEPS, **options)])


def _root_key(strategy: Strategy, state: Any) -> str:
    """Return an untrained strategy's key: a hash of its state, code, device, versions; random if ``state`` is None."""
    if state is None:
        return os.urandom(16).hex()
    body, parts = state
    held = {place: part.name for place, part in parts.items()}
    around = {name: value for name, value in torch_settings().items() if "num_threads" not in name} | package_versions()
    skip, loss = [strategy, strategy.model, strategy.optimizer, strategy.evaluator], strategy._criterion
    users = [loss, getattr(loss, "training", None), strategy.optimizer, *strategy.plugins, *strategy.model.modules()]
    graphs = [part.code(mode) for part in users if isinstance(part, MaskedBackbone) for mode in (False, True)]
    patched = {f"{place}.{name}": value for place, name, _, value in patches(strategy)}
    kept = [*map(type, skip), *users, dict(hooks_of(strategy)), replaced_methods(strategy), *interceptors(), patched]
    return _digest([{**body, "metrics": []}, held, around, strategy.device.type, graphs, script_code(kept, skip)])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
