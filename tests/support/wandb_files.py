"""A logger on an offline run, and what W&B wrote to disk: a reader of its offline runs.

A file `run-<id>.wandb` below `wandb/offline-run-*` is a LevelDB log. A header of 7 bytes (":W&B", 0xBEE1 as u16,
version as u8) is followed by blocks of 32 KiB (the header counts into the first) that hold chunks: crc32 of type and
payload (u32), payload length (u16), type (u8), payload, all little-endian. A record is one FULL chunk, or FIRST, any
MIDDLE and LAST; it holds a protobuf `Record`. Fewer than 7 bytes at the end of a block are padding.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from avalanche_amnesia.logging import WandBLogger
from support.logged_runs import LoggedRun

_HEADER = struct.Struct("<4sHB")
_CHUNK = struct.Struct("<IHB")
_BLOCK = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class OfflineRunError(ValueError):
    """The file is not a readable W&B offline run."""


def read_offline_run(path: str | Path) -> LoggedRun:
    """Read all that an offline run has logged; of a killed run what is whole, with `complete=False`.

    Args:
        path: the file `run-<id>.wandb`, or the folder `offline-run-*` that holds it.

    Raises:
        FileNotFoundError: nothing is at `path`.
        OfflineRunError: the folder holds no or several runs, or the file is of another kind or corrupt.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    file = _run_file(Path(path))
    run = LoggedRun()
    for data in records(file, file.read_bytes()):
        record = wandb_internal_pb2.Record()
        try:
            record.ParseFromString(data)
        except DecodeError as error:
            raise OfflineRunError(f"{file} holds a record that is no W&B record: {error}") from error
        _apply(record, run)
    if not run.id:
        raise OfflineRunError(f"{file} says nothing about its run: W&B was stopped before it had written a record")
    return run


def _run_file(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"no offline run at {path}: pass a run-<id>.wandb file or its offline-run-* folder")
    if path.is_file():
        return path
    files = sorted(path.glob("run-*.wandb"))
    if len(files) != 1:
        raise OfflineRunError(
            f"{path} holds {len(files)} run-*.wandb files, not one: pass one offline-run-* folder or one file"
        )
    return files[0]


def records(file: Path, data: bytes) -> Iterator[bytes]:
    """Payload of every whole record."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[:2] != (b":W&B", 0xBEE1):
        raise OfflineRunError(
            f"{file} ({len(data)} bytes) does not begin like a W&B run: pass the run-<id>.wandb file of an offline run"
        )
    parts: list[bytes] | None = None
    for kind, payload in _chunks(file, data, _HEADER.size):
        if (kind in (_FULL, _FIRST)) != (parts is None):
            raise OfflineRunError(f"{file} is corrupt: the parts of a record are out of order")
        if kind == _FULL:
            yield payload
            continue
        parts = [*(parts or []), payload]
        if kind == _LAST:
            yield b"".join(parts)
            parts = None


def _chunks(file: Path, data: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    """(type, payload) of every whole chunk of `data`, which begins at the start of a block."""
    while True:
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK.size:
            position += left
            continue
        if position + _CHUNK.size > len(data):
            return
        crc, length, kind = _CHUNK.unpack_from(data, position)
        end = position + _CHUNK.size + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or _CHUNK.size + length > left:
            raise OfflineRunError(f"{file} is corrupt at byte {position}: no chunk of a W&B run starts there")
        if end > len(data):
            return  # the tail that a killed writer leaves
        checked = data[position + _CHUNK.size - 1 : end]
        if zlib.crc32(checked) != crc:
            raise OfflineRunError(f"{file} is corrupt at byte {position}: the checksum does not fit the content")
        yield kind, checked[1:]
        position = end


def _apply(record: Any, run: LoggedRun) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.id, run.name = record.run.run_id, record.run.display_name
        run.project, run.group = record.run.project, record.run.run_group
        run.job_type = record.run.job_type
        _update(run.config, record.run.config)
        run.config.pop("_wandb", None)  # W&B's own notes
    elif kind == "config":
        _update(run.config, record.config)
        run.config.pop("_wandb", None)
    elif kind == "summary":
        _update(run.summary, record.summary)
    elif kind == "history":
        row: dict[str, Any] = {}
        for item in record.history.item:
            _put(row, _keys(item), _decoded(item))
        run.rows.append(row)
    elif kind == "metric":
        name = (record.metric.name or record.metric.glob_name).replace(r"\.", ".")
        run.metrics[name] = record.metric.step_metric or run.metrics.get(name)
    elif kind == "exit":
        run.complete = True


def _update(target: dict[str, Any], changes: Any) -> None:
    for item in changes.update:
        _put(target, _keys(item), json.loads(item.value_json))
    for item in changes.remove:
        *path, last = _keys(item)
        holder: Any = target
        for key in path:
            holder = holder.get(key, {})
        holder.pop(last, None)


def _put(target: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    *path, last = keys
    for key in path:
        inner = target.get(key)
        if not isinstance(inner, dict):
            inner = target[key] = {}
        target = inner
    target[last] = value


def _keys(item: Any) -> Sequence[str]:
    return item.nested_key or [item.key]


def _decoded(item: Any) -> Any:
    if item.value_json:
        return json.loads(item.value_json)
    kind = item.WhichOneof("value")  # the typed form that newer versions can write instead
    if kind is None or kind == "none":
        return None
    return json.loads(item.json) if kind == "json" else getattr(item, kind)


def run_folders(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


class Recorder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logger = WandBLogger(dir=folder, mode="offline", project="digits", name="one")

    def log(self, name: str, value: Any, iteration: int = 0) -> None:
        self.logger.log_single_metric(name, value, iteration)

    def read(self) -> LoggedRun:
        self.logger.finish()
        return read_offline_run(self.run_folder)

    @property
    def run_folder(self) -> Path:
        (found,) = run_folders(self.folder)
        return found
