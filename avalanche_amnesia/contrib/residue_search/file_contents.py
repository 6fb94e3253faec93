"""Tensors inside files, read without running any code from them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from avalanche_amnesia.object_walk import reachable

_TORCH = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".dill")
_OTHER = (".safetensors", ".npy", ".npz", ".json", ".jsonl")
_FINGERPRINT = frozenset({"traces", "sketches"})


def is_text(file: Path) -> bool:
    """Tell whether a file of no kind that is looked into is plain text (logs, settings, sources)."""
    if file.suffix.lower() in (*_TORCH, *_OTHER):
        return False
    with file.open("rb") as opened:
        start = opened.read(4096)
    try:
        start.decode()
    except UnicodeDecodeError as error:  # a character may be cut at the end of what was read
        return error.start > len(start) - 4 and b"\0" not in start
    return b"\0" not in start


class UnreadableFileError(ValueError):
    """A file that can't be looked into safely."""


def contents(file: Path) -> Iterator[tuple[str, Any]]:
    """Contents of a file: paths within it, and tensors, arrays or logged values."""
    try:
        yield from _contents(file)
    except UnreadableFileError:
        raise
    except UnpicklingError as error:
        raise UnreadableFileError(
            f"{file}: torch.load refuses it without running code from it (a whole model or strategy, say): load it "
            "yourself, if you trust it, and audit what you loaded"
        ) from error
    except Exception as error:  # readers of broken files raise errors of many types
        raise UnreadableFileError(f"{file}: broken, or not what its name says ({type(error).__name__})") from error


def _contents(file: Path) -> Iterator[tuple[str, Any]]:
    kind = file.suffix.lower()
    if kind == ".safetensors":
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping, though it has keys
                yield name, tensors.get_tensor(name)
            for name, text in (tensors.metadata() or {}).items():  # parts of states have the rest of their values there
                with suppress(ValueError):
                    yield from _json_arrays(json.loads(text), name)
    elif kind in _TORCH:
        yield from reachable(torch.load(file, map_location="cpu", weights_only=True))
    elif kind == ".npy":
        yield "", np.load(file, allow_pickle=False)
    elif kind == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            yield from ((name, arrays[name]) for name in arrays.files)
    elif kind == ".json":
        yield from _json_arrays(json.loads(file.read_text()))
    elif kind == ".jsonl":
        for number, line in enumerate(file.read_text().splitlines()):
            yield from _json_arrays(json.loads(line), f"line {number + 1}")
    elif kind == ".wandb":
        raise UnreadableFileError(
            f"{file}: W&B's own log is not looked into; delete it, or write runs with a JSONLogger, whose files are"
        )
    else:
        raise UnreadableFileError(f"{file}: of a kind that is not looked into (a picture, say)")


def _json_arrays(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Lists of numbers, nested ones as one array, and logged media; the numbers of a fingerprint are no tensor."""
    if isinstance(value, dict):
        if "_type" in value:
            yield path, value
        of_fingerprint = _FINGERPRINT if value.keys() >= _FINGERPRINT else ()
        for key, item in value.items():
            if key in of_fingerprint:
                continue
            yield from _json_arrays(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list) and value:
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            array = np.asarray(0)
        if array.ndim and array.dtype.kind in "fiub":
            yield path, array
            return
        for number, item in enumerate(value):
            yield from _json_arrays(item, f"{path}[{number}]")
