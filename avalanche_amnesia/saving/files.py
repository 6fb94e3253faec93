"""Files that are replaced as a whole and carry checksums; the directory of a saved state.

A state is one JSON file, and the parts that it names by their content: each a safetensors file, with the JSON of the
value whose tensors it has in its header. A part that stayed the same is not written again.
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
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from avalanche_amnesia.saving.values import StateError

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"
HEAD = {"format": "avalanche-amnesia state", "version": 3}
Check = Callable[[Mapping[str, Any], Any], None]
"""Raises unless something is the signature of a content."""
Sign = Callable[[Mapping[str, Any]], Mapping[str, str]]
"""Makes the signature of a content."""
_CODE = "code"
_MOST = 2**16
"""Files that are remembered, of which each takes some hundred bytes."""
BLOB = re.compile(r"[0-9a-f]{32}\.safetensors(\.part)?")


class Part(dict[str, "Tensor"]):
    """Tensors of a part of a state, by their paths in it, and the JSON of the value that has them."""

    def __init__(self, tensors: Mapping[str, Tensor], code: str = "") -> None:
        super().__init__(tensors)
        self.code = code  # empty for the part "state", whose JSON is the state's own
        self.lasts = False  # whether code and tensors stay as they are, so that one look at them is enough
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """Hash of code, names and tensors, which takes less time than to make the file."""
        from avalanche_amnesia.bits import state_hashes

        if self._digest is None or not self.lasts:
            content = json.dumps([self.code, state_hashes(self)])
            self._digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
        return self._digest


Parts = dict[str, Part]
"""Path in the state → the part there; "state" → what lies in no other part."""


@contextmanager
def as_state_error(path: Path, fault: str) -> Iterator[None]:
    """Make whatever is raised while a state is read or given one error that begins with its place."""
    # Anybody may have written the files: they lead to errors of JSON, safetensors, torch and every plugin.
    try:
        yield
    except Exception as error:
        if isinstance(error, StateError) and str(error).startswith(str(path)):
            raise
        said = str(error) if isinstance(error, ValueError) else repr(error)
        raise StateError(f"{fault}: {said:.1000}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say of an error that comes from the disk what to do about it; safetensors wraps those in its own kind."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        failed = OSError(
            f"{path} can't be written ({error}); what was there stays. Make room on its disk, or see to its "
            "permissions, and do the same again"
        )
        failed.errno = getattr(error, "errno", None)
        raise failed from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Path for a file's new content, which takes the file's place when the block ends: whole, and on disk.

    Killed at any moment, there is the old file or the new one. Nothing is written through a link that lies there.
    """
    with replacing_all([file]) as (part,):
        yield part


@contextmanager
def replacing_all(files: Sequence[Path]) -> Iterator[list[Path]]:
    """As :func:`replacing`, of several: once all are on disk, they take their places one after the other."""
    parts = [file.with_name(f"{file.name}.part") for file in files]
    for part in parts:
        part.unlink(missing_ok=True)
    try:
        for part in parts:
            part.open("xb").close()  # an error where a link was put there in between
        yield parts
        with ThreadPoolExecutor(len(parts)) as pool:  # the disk takes as long for all at a time as for one
            list(pool.map(_to_disk, parts))
        for part, file in zip(parts, files, strict=True):
            os.replace(part, file)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise


def _to_disk(file: Path) -> None:
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())


def replace_file(file: Path, content: bytes) -> None:
    """Write a file as a whole or not at all, see :func:`replacing`."""
    with replacing(file) as part:
        part.write_bytes(content)


def sealed(content: Mapping[str, Any], **head: Any) -> str:
    """JSON of a content, with a head and a checksum, which guards against damage, not against attack."""
    checksum = hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()
    return json.dumps({**head, "checksum": checksum, "content": content}, allow_nan=False)


def unsealed(text: str, check: Check | None = None, **head: Any) -> dict[str, Any]:
    """The content that :func:`sealed` was given, with this head; an error unless it is that to the letter.

    A signature may stand in the head besides; ``check`` gets the content and the signature, None where there is none.
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
    if sealed(content, **head, **further) != text:
        raise ValueError("it is damaged, its checksum does not fit")
    if check is not None:
        check(content, further.get("signature"))
    return content


@contextmanager
def locked(path: Path, to_write: bool) -> Iterator[None]:
    """Let nobody write into a directory meanwhile who locks it too, nor read from it where this one writes.

    The lock is the open directory's: it needs no file, and ends with its process, however that ends.
    """
    if os.name == "nt" or not path.is_dir():
        yield
        return
    import fcntl

    opened = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have none
            fcntl.flock(opened, fcntl.LOCK_EX if to_write else fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):  # of processes that were forked meanwhile, too
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


def write_state(
    path: Path,
    body: Mapping[str, Any],
    parts: Mapping[str, Part],
    blobs: Path | None = None,
    sign: Sign | None = None,
) -> None:
    """Write a state as a whole or not at all: killed at any moment, the directory holds the old state or the new one.

    Of several processes that write there at a time, the last one's state stays.
    Parts lie in files named after their content; those that are there already are not written again, and those that
    the new state does not name are deleted. A signature covers the parts by these names.
    """
    refuse_foreign(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with writing(path), locked(path, to_write=True):
        folder, new = blobs or path, dict[Path, bytes]()
        files = {place: _file_of(part, folder, new) for place, part in parts.items()}
        new[path / STATE] = state_text(body, files, sign).encode()  # the last to take its place
        with replacing_all([*new]) as written:
            for file, content_of in zip(written, new.values(), strict=True):
                file.write_bytes(content_of)
        _sync(path)  # else a power failure might leave the old state without the files that go now
        for name in {file.name for file in path.iterdir()}.difference(files.values()):
            if BLOB.fullmatch(name):
                (path / name).unlink(missing_ok=True)


def state_text(body: Mapping[str, Any], files: Mapping[str, str], sign: Sign | None = None) -> str:
    """Text of a state's file, by the names of the files that its parts lie in."""
    content = {"parts": files, "body": body}
    signature = {} if sign is None else {"signature": sign(content)}
    return sealed(content, **HEAD, **signature)


def _sync(folder: Path) -> None:
    """Wait until the names of a directory's files are on disk."""
    if os.name == "nt":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems can't
            os.fsync(opened)
    finally:
        os.close(opened)


def refuse_foreign(path: Path) -> None:
    """Raise unless a state may be written to a directory: it holds one, or nothing, or does not exist."""
    if not path.exists():
        return
    if not path.is_dir():
        raise StateError(f"{path} is a file: a state is a directory, give the name of a new one")
    others = [file.name for file in path.iterdir() if not BLOB.fullmatch(file.name)]
    others = [name for name in others if name not in (STATE, f"{STATE}.part")]
    if others:
        raise StateError(f"{path} holds {sorted(others)[:3]}, which are no part of a state: give a new directory")


def read_state(path: Path, blobs: Path | None = None, check: Check | None = None) -> tuple[dict[str, Any], Parts]:
    """Body and parts of a state; runs no code from it."""
    with locked(path, to_write=False):
        body, files = read_body(path, check)
        return body, {place: read_part((blobs or path) / name) for place, name in files.items()}


def read_body(path: Path, check: Check | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Body of a state, and the files of its parts."""
    file = path / STATE
    if not file.is_file():
        raise StateError(
            f"{path} holds no state ({STATE} is missing): give the directory that strategy.save(path) made"
        )
    with as_state_error(path, f"{file} is no state that can be loaded"):
        content = unsealed(file.read_bytes().decode(), check, **HEAD)
        for name in content["parts"].values():
            if not BLOB.fullmatch(name):
                raise StateError(f"it names {name!r}, which is no file of a state")
        return content["body"], content["parts"]


_FILES: dict[str, str] = {}
"""Digest of a part → name of its file."""


def _file_of(part: Part, folder: Path, new: dict[Path, bytes]) -> str:
    """Name of a part's file in a directory; ``new`` receives its content if it is not there yet, or damaged."""
    digest = part.digest
    name = _FILES.get(digest)
    if name is None or not _is_whole(folder / name):
        content = part_content(part)
        name = part_name(content)
        if len(_FILES) >= _MOST:
            _FILES.clear()
        _FILES[digest] = name
        if not _is_whole(folder / name):
            new[folder / name] = content
    return name


def part_content(part: Part) -> bytes:
    """Content of a part's file."""
    from safetensors.torch import save  # and torch with it, which records are read without

    metadata = {_CODE: part.code} if part.code else None
    return save({place: tensor.detach().cpu().contiguous().clone() for place, tensor in part.items()}, metadata)


def _is_whole(file: Path) -> bool:
    """Tell whether a file, which is no link, is there and holds what its name says."""
    try:
        found = os.lstat(file)
    except FileNotFoundError:
        return False
    place_and_time = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return stat.S_ISREG(found.st_mode) and _fits_name(file, place_and_time)


@lru_cache(_MOST)
def _fits_name(file: Path, place_and_time: tuple[int, ...]) -> bool:
    """Look into a file, once as long as it stays where it lies and is not written again."""
    return part_name(file.read_bytes()) == file.name


def read_part(file: Path) -> Part:
    """A part from its file; an error where that is damaged."""
    from safetensors.torch import load

    with as_state_error(file, f"{file} can't be read, and the state lacks a part of its tensors"):
        content = file.read_bytes()
        if part_name(content) != file.name:
            raise StateError(f"{file} is damaged: its content does not fit its name")
        tensors, (size,) = load(content), struct.unpack("<Q", content[:8])
        return Part(tensors, json.loads(content[8 : 8 + size]).get("__metadata__", {}).get(_CODE, ""))


def part_name(content: bytes) -> str:
    """Name of a part's file, by its content."""
    return f"{hashlib.sha256(content).hexdigest()[:32]}.safetensors"
