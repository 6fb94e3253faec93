"""Undo logs as safetensors files: a directory with one file per task.

Every file carries a checksum. A flipped bit raises an error when the file is opened and when a mapped log is used.

A log's file is named by task and checksum and never changes, so writing the same log again does nothing. New files are
written under a temporary name and renamed when complete; then ``index.json``, which lists the current files, is
replaced. So the index lists complete files of one state even after a kill. Files not listed are deleted later.

A directory belongs to the trajectory that wrote its index. :class:`~avalanche_amnesia.trajectory.Trajectory` describes
when an unpickled trajectory may write to its directory.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import safe_open
from safetensors.torch import save_file

from avalanche_amnesia import checks
from avalanche_amnesia.saving.encoding import decode, encode
from avalanche_amnesia.saving.files import Part, locked, replace_file, replacing, sealed, unsealed, writing
from avalanche_amnesia.trajectory.sparse import SparseUpdates, SparseValues
from avalanche_amnesia.trajectory.undo_log import AddedError, Log, LogFile

INDEX = "index.json"
_OURS = re.compile(r"(task_-?\d+\.[0-9a-f]+\.safetensors|index\.json)(\.part)?")


class TrajectoryError(ValueError):
    """Error for a log that can't be recorded, found or read, or for a directory of another trajectory."""


def _part_of(task: int, log: Log) -> Part:
    """Return a log's tensors, and task and all further values of the log as JSON, as in a saved state."""
    code, parts = encode([task, log.state()])
    return Part(parts.get("state", {}), json.dumps(code))


def check_file(task: int, log: Log) -> None:
    """Raise TrajectoryError if the mapped file of a log was changed."""
    if log.file is not None and (_was_cut(log.file) or _part_of(task, log).digest != log.file.checksum):
        raise TrajectoryError(
            f"{log.file.path} was changed after it had been written: the log of task {task} is damaged, and can't be "
            "used. Go on from the last saved strategy (torch.save), which has its logs with it, or from a copy of the "
            "directory"
        )


def _was_cut(file: LogFile) -> bool:
    """Return True if the size of a mapped file has changed; this is tested because reading past its end would crash."""
    if not file.path.exists():
        return False
    status = file.path.stat()
    return (status.st_dev, status.st_ino) == file.place and status.st_size != file.size


class LogDirectory:
    """Directory of undo-log files. An unpickled object may write to the directory; a deep copy of it is None."""

    def __init__(self, path: str | Path) -> None:
        self.path = checks.path("path", path)
        self._beginning = uuid4().hex
        self._index: str | None = None  # content of the index, last written or read; None: no index
        self._may_take_back = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None, "_may_take_back": True}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def open(self) -> tuple[dict[int, Log], frozenset[int]]:
        """Read the directory, or create it; return its undo logs, in training order, and the merged tasks."""
        logs: dict[int, Log] = {}
        merged: frozenset[int] = frozenset()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("it may not be read and written to")
            with locked(self.path, to_write=True):
                self._index = self._index_on_disk()
                if self._index is not None:
                    body = unsealed(self._index)
                    logs = dict(self._read(row["file"]) for row in body["logs"])
                    self._beginning, merged = body["trajectory"], frozenset(body["merged"])
            self.sweep()
        except Exception as error:  # foreign files may cause any error
            raise TrajectoryError(
                f"{self.path}: no trajectory that can be continued is here ({type(error).__name__}: {error}); give an "
                "empty directory that can be written to, or one that a Trajectory wrote. A strategy that was saved "
                "(torch.save) has its logs with it, and writes them again once this directory is moved away"
            ) from error
        return logs, merged

    def check(self) -> None:
        """Raise TrajectoryError if another trajectory changed the directory, so that :meth:`write` would fail."""
        self._refuse_others(self._index_on_disk())

    def write(self, logs: Mapping[int, Log], merged: frozenset[int]) -> dict[int, Log]:
        """Replace the logs in the directory, new files first and the index last; return logs mapped from the files."""
        made: list[Path] = []
        mine = self._index
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with writing(self.path), locked(self.path, to_write=True):
            found = self._index_on_disk()
            self._refuse_others(found)
            try:
                written = {task: self._stored(task, log, made) for task, log in logs.items()}
                rows = [{"task": t, "file": log.file.path.name} for t, log in written.items() if log.file is not None]
                index = sealed({"trajectory": self._beginning, "logs": rows, "merged": sorted(merged)})
                if index != found:
                    self._point_to(index)
            except BaseException:
                if self._index_on_disk() != found:  # interrupted just after the replacement
                    self._index = index  # valid if restoring the old index fails, too
                    self._point_to(found)
                    self._index = mine
                for file in made:
                    file.unlink(missing_ok=True)
                raise
        self._index, self._may_take_back = index, False
        return written

    def sweep(self) -> None:
        """Delete log files not listed in the index, unless the index belongs to a different trajectory."""
        with writing(self.path), locked(self.path, to_write=True):
            if self._may_take_back or self._index_on_disk() != self._index:
                return
            named = set() if self._index is None else {INDEX, *(r["file"] for r in unsealed(self._index)["logs"])}
            for file in self.path.iterdir():
                if _OURS.fullmatch(file.name) and file.name not in named:
                    file.unlink(missing_ok=True)

    def _refuse_others(self, found: str | None) -> None:
        if not self._may_take_back:
            if found == self._index:
                return
            raise TrajectoryError(
                f"{self.path} was changed by another trajectory, or moved away; give every strategy (and every "
                "reference) a directory of its own. A strategy that is loaded from a checkpoint takes its own back"
            )
        if found is None:
            return
        try:
            theirs = unsealed(found)["trajectory"] != self._beginning
        except Exception as error:  # a damaged index may cause any error
            raise TrajectoryError(
                f"{self.path / INDEX} is damaged, or none of a trajectory ({type(error).__name__}: {error}); move "
                f"{self.path} away, and the logs of the loaded strategy are written again"
            ) from error
        if theirs:
            raise TrajectoryError(
                f"{self.path} was changed by another trajectory, which began again there; move it away, and the logs "
                "of the loaded strategy are written again"
            )

    def _point_to(self, index: str | None) -> None:
        if index is None:
            (self.path / INDEX).unlink(missing_ok=True)
        else:
            replace_file(self.path / INDEX, index.encode())

    def _index_on_disk(self) -> str | None:
        index = self.path / INDEX
        return index.read_bytes().decode(errors="replace") if index.exists() else None

    def _stored(self, task: int, log: Log, made: list[Path]) -> Log:
        """Return a log mapped from its file, which is written if missing; append the path of a new file to ``made``."""
        if log.file is not None and log.file.path.parent == self.path and log.file.path.exists():
            return log
        check_file(task, log)
        part = _part_of(task, log)
        path = self.path / _name(task, part.digest)
        if path.exists():
            try:
                return self._read(path.name)[1]
            except TrajectoryError:  # damaged: write it again
                pass
        else:
            made.append(path)
        with replacing(path) as new:
            tensors = {key: tensor.contiguous() for key, tensor in part.items()}
            save_file(tensors, str(new), metadata={"log": part.code})
        return self._read(path.name)[1]

    def _read(self, name: str) -> tuple[int, Log]:
        """Return the task and the log in file ``name``, with tensors mapped into memory; raise an error if damaged."""
        path = self.path / name
        try:
            status = path.stat()
            with safe_open(str(path), framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
                part = Part(tensors, file.metadata()["log"])
            checksum = part.digest
            task, state = decode(json.loads(part.code), {"state": part})
            entries, parameters, rounding, repair_of = state.values()
            found = {name: (SparseUpdates if "codes" in of else SparseValues)(**of) for name, of in entries.items()}
            mapped = LogFile(path, (status.st_dev, status.st_ino), status.st_size, checksum)
            log = Log(found, parameters, AddedError(**rounding), repair_of, mapped)
        except Exception as error:  # a damaged file may cause any error
            raise TrajectoryError(f"{path} is damaged, or no log ({type(error).__name__}: {error})") from error
        if _name(task, checksum) != name:
            raise TrajectoryError(f"{path} is damaged, or holds another log than its name says")
        return task, log


def _name(task: int, checksum: str) -> str:
    return f"task_{task}.{checksum}.safetensors"
