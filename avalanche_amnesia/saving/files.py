"""Atomic replacement of files, checksums, and reading and writing of the directory of a saved state.

A state is one JSON file and the parts that it names by their content hash. Each part is a safetensors file whose header
holds the JSON of its value. An unchanged part is not written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from avalanche_amnesia.saving.values import StateError

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"
HEAD = {"format": "avalanche-amnesia state", "version": 4}
Check = Callable[[Mapping[str, Any], Any], None]
"""Function (content, signature) that raises an error unless the signature fits the content."""
Sign = Callable[[Mapping[str, Any]], Mapping[str, str]]
"""Function that returns the signature of a content."""
_CODE = "code"
_MOST = 2**16
"""Number of checked files in the cache, at a few hundred bytes each."""
BLOB = re.compile(r"[0-9a-f]{32}\.safetensors(\.part)?")


class Part(dict[str, "Tensor"]):
    """Content of one file of a saved state: a dict of path in the state to tensor, with the other values as JSON."""

    def __init__(self, tensors: Mapping[str, Tensor], code: str = "") -> None:
        super().__init__(tensors)
        self.code = code  # empty for the part "state", whose JSON is the state's own

    @property
    def name(self) -> str:
        """Return the name of the part's file: a hash of the part's JSON, names and tensors."""
        from avalanche_amnesia.bits import state_hashes

        content = json.dumps([self.code, state_hashes(self)])
        return f"{hashlib.sha256(content.encode(errors='surrogatepass')).hexdigest()[:32]}.safetensors"


Parts = dict[str, Part]
"""Path in the state → the part at this path; "state" → the tensors outside of all other parts."""


@contextmanager
def as_state_error(path: Path, fault: str) -> Iterator[None]:
    """In a ``with`` block that reads or loads a state, convert errors to a StateError that begins with ``fault``."""
    # Damaged or foreign files cause errors in JSON, safetensors, torch and every plugin.
    try:
        yield
    except Exception as error:
        if isinstance(error, StateError) and str(error).startswith(str(path)):
            raise
        said = str(error) if isinstance(error, ValueError) else repr(error)
        raise StateError(f"{fault}: {said:.1000}") from error


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """In a ``with`` block that writes ``path``, convert file errors to an OSError that names the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        failed = OSError(
            f"{path} can't be written ({error}); the old file is unchanged. Make room on its disk, or see to its "
            "permissions, and do the same again"
        )
        failed.errno = getattr(error, "errno", None)
        raise failed from error


@contextmanager
def replace_files(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield temporary paths to write to. After the ``with`` block, move the files to the given paths, one by one.

    If the process is killed, the old or the new file exists completely. A symbolic link is replaced, not followed.
    """
    parts = [file.with_name(f"{file.name}.part") for file in files]
    for part in parts:
        part.unlink(missing_ok=True)
    try:
        for part in parts:
            part.open("xb").close()  # fails if a link was created there in between
        yield parts
        with ThreadPoolExecutor(len(parts)) as pool:  # syncing all files at once takes as long as syncing one
            list(pool.map(_flush, parts))
        for part, file in zip(parts, files, strict=True):
            os.replace(part, file)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise


def _flush(path: Path, access: int = os.O_RDWR) -> None:
    """Wait until a file's content is on disk (fsync) or, with read access, a directory's list of files."""
    opened = os.open(path, access)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def replace_file(file: Path, content: bytes) -> None:
    """Write a file completely or not at all; see :func:`replace_files`."""
    with replace_files([file]) as (part,):
        part.write_bytes(content)


def seal(content: Mapping[str, Any], **head: Any) -> str:
    """Return ``content`` as JSON with the fields ``head`` and a checksum, which detects damage but not attacks."""
    checksum = hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()
    return json.dumps({**head, "checksum": checksum, "content": content}, allow_nan=False)


def unseal(text: str, check: Check | None = None, **head: Any) -> dict[str, Any]:
    """Return the content of a text made by :func:`seal`; raise ValueError for a wrong checksum or another ``head``.

    If ``check`` is given, it is called with the content and the text's signature (None if the text has none).
    """
    try:
        found = json.loads(text)
        ours = {name: found[name] for name in head}
        content: dict[str, Any] = found["content"]
        further = {"signature": found["signature"]} if "signature" in found else {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("it was cut short, or something else wrote it") from error
    for name, value in head.items():
        if ours[name] != value:
            raise ValueError(f"it has {name} {ours[name]}, and this package reads {name} {value}")
    if seal(content, **head, **further) != text:
        raise ValueError("it is damaged, its checksum does not fit")
    if check is not None:
        check(content, further.get("signature"))
    return content


@contextmanager
def lock_directory(path: Path, to_write: bool) -> Iterator[None]:
    """Hold a lock on a directory in a ``with`` block: one writer (``to_write``) or several readers at a time.

    The lock belongs to the open directory: it needs no file, and ends with the process.
    """
    if os.name == "nt" or not path.is_dir():
        yield
        return
    import fcntl

    opened = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(opened, fcntl.LOCK_EX if to_write else fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):  # releases the lock in forked processes, too
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


def write_state(
    path: Path,
    body: Mapping[str, Any],
    parts: Mapping[str, Part],
    blobs: Path | None = None,
    sign: Sign | None = None,
) -> None:
    """Write a state to a directory, completely or not at all, even if the process is killed.

    If several processes write at once, the last state remains. Each part is a file named by its content hash: an
    existing file is not written again, and files that the new state does not name are deleted. A signature covers
    the parts through these names.
    """
    refuse_other_files(path)
    with explain_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    with explain_errors(path), lock_directory(path, to_write=True):
        files = {place: part.name for place, part in parts.items()}
        places = {(blobs or path) / files[place]: part for place, part in parts.items()}
        # Made one at a time: together they would be a second copy of the model in memory.
        new = {file: partial(part_bytes, part) for file, part in places.items() if not _is_whole(file)}
        content = {"parts": files, "body": body}
        signature = {} if sign is None else {"signature": sign(content)}
        new[path / STATE] = partial(seal(content, **HEAD, **signature).encode)  # the state file is replaced last
        with replace_files([*new]) as written:
            for file, content_of in zip(written, new.values(), strict=True):
                file.write_bytes(content_of())
        if os.name != "nt":
            with suppress(OSError):  # not supported by some network file systems
                _flush(path, os.O_RDONLY)  # otherwise a power failure could leave the old state without its files
        for name in {file.name for file in path.iterdir()}.difference(files.values()):
            if BLOB.fullmatch(name):
                (path / name).unlink(missing_ok=True)


def refuse_other_files(path: Path) -> None:
    """Raise StateError if ``path`` is a file, or a directory with files that belong to no saved state."""
    if not path.exists():
        return
    if not path.is_dir():
        raise StateError(f"{path} is a file: a state is a directory, give the name of a new one")
    others = [file.name for file in path.iterdir() if not BLOB.fullmatch(file.name)]
    if others := [name for name in others if name not in (STATE, f"{STATE}.part")]:
        raise StateError(f"{path} holds {sorted(others)[:3]}, which are no part of a state: give a new directory")


def read_state(path: Path, blobs: Path | None = None, check: Check | None = None) -> tuple[dict[str, Any], Parts]:
    """Return (JSON body, parts with tensors) of the state in a directory, without running code from its files."""
    with lock_directory(path, to_write=False):
        body, files = read_body(path, check)
        return body, {place: read_part((blobs or path) / name) for place, name in files.items()}


def read_body(path: Path, check: Check | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (JSON body of the state in a directory, ``{path in the state: name of the file with this part}``)."""
    file = path / STATE
    if not file.is_file():
        raise StateError(f"{path} has no state ({STATE} is missing): give the directory that strategy.save(path) made")
    with as_state_error(path, f"{file} is no state that can be loaded"):
        content = unseal(file.read_bytes().decode(), check, **HEAD)
        for name in content["parts"].values():
            if not BLOB.fullmatch(name):
                raise StateError(f"it names {name!r}, which is no file of a state")
        return content["body"], content["parts"]


def part_bytes(part: Part) -> bytes:
    """Return a part of a state (tensors and JSON) as bytes in the safetensors format, to be written to a file."""
    from safetensors.torch import save  # imported here, because records are read without torch

    metadata = {_CODE: part.code} if part.code else None
    tensors, storages = dict[str, "Tensor"](), set[int]()
    for place, tensor in part.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[place] = tensor.clone() if storage in storages else tensor  # the format has no shared memory
        storages.add(storage)
    return save(tensors, metadata)


def _is_whole(file: Path) -> bool:
    """Return True if a regular file exists and its content has the hash in the file's name."""
    try:
        found = os.lstat(file)
    except FileNotFoundError:
        return False
    place_and_time = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return stat.S_ISREG(found.st_mode) and _is_undamaged(file, place_and_time)


@lru_cache(_MOST)
def _is_undamaged(file: Path, place_and_time: tuple[int, ...]) -> bool:
    """Return True if a file has the hash in its name; cached until the file's inode, size or time changes."""
    with suppress(StateError):
        read_part(file)
        return True
    return False


def read_part(file: Path) -> Part:
    """Return the part of a state (tensors and JSON) in a file; raise StateError if the file is damaged."""
    with as_state_error(file, f"{file} is damaged, or can't be read, and the state lacks a part of its tensors"):
        part = part_of(file.read_bytes())
        if part.name != file.name:
            raise StateError(f"{file} is damaged: its content does not fit its name")
        return part


def part_of(content: bytes) -> Part:
    """Return the part of a state (tensors and JSON) in the bytes of a safetensors file."""
    from safetensors.torch import load

    tensors, (size,) = load(content), struct.unpack("<Q", content[:8])
    return Part(tensors, json.loads(content[8 : 8 + size]).get("__metadata__", {}).get(_CODE, ""))
