"""Undo logs as safetensors files: one file, or a directory with one per task.

In a directory a log's file never changes: new logs are new files, written under another name first and renamed when
whole; then ``index.json``, which names the files that count, is replaced. Whenever a run is killed, the index names
whole files of one and the same state. Files that it does not name are deleted at the next opportunity.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from avalanche_amnesia.unlearning.coded import SparseUpdates
from avalanche_amnesia.unlearning.fidelity import AddedError
from avalanche_amnesia.unlearning.log import Log
from avalanche_amnesia.unlearning.sparse import SparseEntries, SparseValues

INDEX = "index.json"
_OURS = re.compile(r"(task_-?\d+\.\d+\.safetensors|index\.json)(\.part)?")


class TrajectoryError(ValueError):
    """A task's update can't be recorded or found."""


def write_logs(path: Path, logs: Mapping[int, Log], merged: frozenset[int] = frozenset()) -> None:
    """Write logs to one file, whole or not at all."""
    tensors = {
        f"{task}/{name}/{part}": tensor.contiguous()
        for task, log in logs.items()
        for name, entry in log.items()
        for part, tensor in entry.parts.items()
    }
    heads = {
        task: {
            "tensors": {name: [str(e.dtype).removeprefix("torch."), *e.shape] for name, e in log.items()},
            "parameters": log.parameters,
            "errors": {option: asdict(error) for option, error in log.errors.items()},
            "repair_of": None if log.repair_of is None else sorted(log.repair_of),
        }
        for task, log in logs.items()
    }
    metadata = {"tasks": json.dumps(list(logs)), "logs": json.dumps(heads), "merged": json.dumps(sorted(merged))}
    _replace(path, lambda part: save_file(tensors, str(part), metadata=metadata))


def read_logs(path: Path) -> tuple[dict[int, Log], frozenset[int]]:
    """Logs and merged tasks of one file; its tensors are mapped into memory, not loaded."""
    logs = {}
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if "logs" not in metadata:
            raise TrajectoryError(f"{path} is no trajectory; give a file that Trajectory.save wrote")
        heads = json.loads(metadata["logs"])
        stored: dict[str, dict[str, Any]] = {}
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            owner, part = key.rsplit("/", 1)
            stored.setdefault(owner, {})[part] = file.get_tensor(key)
        for task in json.loads(metadata["tasks"]):
            head = heads[str(task)]
            entries = {name: _entries(stored[f"{task}/{name}"], *kind) for name, kind in head["tensors"].items()}
            errors = {option: AddedError(**error) for option, error in head["errors"].items()}
            repair_of = head.get("repair_of")
            logs[task] = Log(entries, head["parameters"], errors, None if repair_of is None else frozenset(repair_of))
    return logs, frozenset(json.loads(metadata["merged"]))


def _entries(parts: Mapping[str, Any], dtype: str, *shape: int) -> SparseEntries:
    if "codes" in parts:
        return SparseUpdates(**parts, shape=shape)
    return SparseValues(**parts, dtype=getattr(torch, dtype), shape=shape)


class LogDirectory:
    """A directory of undo logs.

    Args:
        path: made if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._index = b""

    def open(self) -> tuple[dict[int, Log], frozenset[int]]:
        """The logs that are there, in training order, and the merged tasks.

        Raises:
            TrajectoryError: if the index is none of ours, or a file that it names is missing.
        """
        self._index = self._index_on_disk()
        if not self._index:
            return {}, frozenset()
        logs = {}
        try:
            index = json.loads(self._index)
            for row in index["logs"]:
                (log,) = read_logs(self.path / row["file"])[0].values()
                log.file = row["file"]
                logs[int(row["task"])] = log
            merged = frozenset(index["merged"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise TrajectoryError(
                f"{self.path} holds no trajectory that can be continued ({type(error).__name__}: {error}); give an "
                "empty directory, or one that a Trajectory wrote"
            ) from error
        self.sweep()
        return logs, merged

    def write(self, logs: Mapping[int, Log], merged: frozenset[int]) -> dict[int, Log]:
        """Make these the directory's logs, new files first and the index last.

        Returns:
            The same logs, mapped from their files.

        Raises:
            TrajectoryError: if another trajectory wrote into the directory meanwhile.
            OSError: if something can't be written; then the old index stands.
        """
        if self._index_on_disk() != self._index:
            raise TrajectoryError(
                f"{self.path} was changed by another trajectory; give every strategy (and every reference) a "
                "directory of its own"
            )
        written = {task: log if self._has(log) else self._write(task, log) for task, log in logs.items()}
        rows = [{"task": task, "file": log.file} for task, log in written.items()]
        index = json.dumps({"logs": rows, "merged": sorted(merged)}, indent=1).encode()
        try:
            self._point_to(index)
        except BaseException:
            if self._index_on_disk() != self._index:  # interrupted just behind the replacement
                self._point_to(self._index)
            raise
        self._index = index
        return written

    def sweep(self) -> None:
        """Delete our files that the index does not name."""
        named = {INDEX, *(row["file"] for row in json.loads(self._index)["logs"])} if self._index else set()
        for file in self.path.iterdir():
            if _OURS.fullmatch(file.name) and file.name not in named:
                file.unlink(missing_ok=True)

    def _point_to(self, index: bytes) -> None:
        if index:
            _replace(self.path / INDEX, lambda part: part.write_bytes(index))
        else:
            (self.path / INDEX).unlink(missing_ok=True)

    def _index_on_disk(self) -> bytes:
        index = self.path / INDEX
        return index.read_bytes() if index.exists() else b""

    def _has(self, log: Log) -> bool:
        return log.file is not None and (self.path / log.file).exists()

    def _write(self, task: int, log: Log) -> Log:
        names = (f"task_{task}.{number}.safetensors" for number in count())
        file = next(name for name in names if not (self.path / name).exists())
        write_logs(self.path / file, {task: log})
        mapped = read_logs(self.path / file)[0][task]
        mapped.file = file
        return mapped


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, have it on disk, then give it its name."""
    part = path.with_name(f"{path.name}.part")
    try:
        write(part)
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
