"""A logger with an offline run, and a reader of W&B's offline runs.

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

from wandb.proto import wandb_internal_pb2

from avalanche_amnesia.logging import WandBLogger
from support.logged_runs import LoggedRun

_HEADER = struct.Struct("<4sHB")
_CHUNK = struct.Struct("<IHB")
_BLOCK = 32 * 1024
_FULL, _LAST = 1, 4


def read_offline_run(path: str | Path) -> LoggedRun:
    """Return the content of an offline run; for a killed run, its whole records.

    Args:
        path: the file `run-<id>.wandb`, or its folder `offline-run-*`.
    """
    run, path = LoggedRun(), Path(path)
    (file,) = [path] if path.is_file() else path.glob("run-*.wandb")
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        _apply(record, run)
    return run


def records(data: bytes) -> Iterator[bytes]:
    """Yield the payload of every whole record."""
    assert _HEADER.unpack_from(data)[:2] == (b":W&B", 0xBEE1)
    position, parts = _HEADER.size, b""
    while True:
        left = _BLOCK - position % _BLOCK
        if left < _CHUNK.size:
            position += left
            continue
        if position + _CHUNK.size > len(data):
            return
        crc, length, kind = _CHUNK.unpack_from(data, position)
        end = position + _CHUNK.size + length
        if end > len(data):
            return  # the end of a killed writer's file
        checked = data[position + _CHUNK.size - 1 : end]
        assert zlib.crc32(checked) == crc, f"{position}: the checksum does not fit the content"
        parts += checked[1:]
        position = end
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


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
