"""Files that are replaced as a whole and carry checksums; the directory of a saved state.

A state is one JSON file, and the tensors that it names by their content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"
HEAD = {"format": "avalanche-amnesia state", "version": 2}
Check = Callable[[Mapping[str, Any], Any], None]
"""Raises unless something is the signature of a content."""
BLOB = re.compile(r"[0-9a-f]{32}\.safetensors(\.part)?")


class StateError(ValueError):
    """A state that can't be saved, or a file that is none, is damaged, or belongs to another strategy."""


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
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    try:
        part.open("xb").close()  # an error where a link was put there in between
        yield part
        with part.open("r+b") as opened:
            os.fsync(opened.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
    tensors: Mapping[str, Mapping[str, Tensor]],
    blobs: Path | None = None,
    sign: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None,
) -> None:
    """Write a state as a whole or not at all: killed at any moment, the directory holds the old state or the new one.

    Of several processes that write there at a time, the last one's state stays.
    Tensors lie in files named after their content; those that are there already are not written again, and those that
    the new state does not name are deleted. A signature covers the tensors by these names.
    """
    refuse_foreign(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with writing(path), locked(path, to_write=True):
        files = {group: _write_blob(blobs or path, of_group) for group, of_group in tensors.items()}
        content = {"tensors": files, "body": body}
        signature = {} if sign is None else {"signature": sign(content)}
        replace_file(path / STATE, sealed(content, **HEAD, **signature).encode())
        for file in path.iterdir():
            if BLOB.fullmatch(file.name) and file.name not in files.values():
                file.unlink(missing_ok=True)


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


def read_state(
    path: Path, blobs: Path | None = None, check: Check | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Body and tensors of a state; runs no code from it."""
    with locked(path, to_write=False):
        body, files = read_body(path, check)
        return body, {group: _read_blob((blobs or path) / name) for group, name in files.items()}


def read_body(path: Path, check: Check | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Body of a state, and the files of its groups of tensors."""
    file = path / STATE
    if not file.is_file():
        raise StateError(
            f"{path} holds no state ({STATE} is missing): give the directory that strategy.save(path) made"
        )
    with as_state_error(path, f"{file} is no state that can be loaded"):
        content = unsealed(file.read_bytes().decode(), check, **HEAD)
        for name in content["tensors"].values():
            if not BLOB.fullmatch(name):
                raise StateError(f"it names {name!r}, which is no file of a state")
        return content["body"], content["tensors"]


def _write_blob(path: Path, tensors: Mapping[str, Tensor]) -> str:
    from safetensors.torch import save  # and torch with it, which records are read without

    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    name = _name(content)
    if not (path / name).is_file() or (path / name).read_bytes() != content:  # a damaged one is written again
        replace_file(path / name, content)
    return name


def _read_blob(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load

    with as_state_error(file, f"{file} can't be read, and the state lacks a part of its tensors"):
        content = file.read_bytes()
        if _name(content) != file.name:
            raise StateError(f"{file} is damaged: its content does not fit its name")
        return load(content)


def _name(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:32]}.safetensors"
