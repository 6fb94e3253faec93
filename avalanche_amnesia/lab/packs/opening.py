"""Folders and packs of runs, read alike."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from avalanche_amnesia.lab.packs.index import INDEX
from avalanche_amnesia.saving.values import StateError


@contextmanager
def as_folder(path: Path, public_keys: Sequence[Any] = ()) -> Iterator[Path]:
    """Folder with the logs, records and settings in a pack, while the block lasts; else it is the path itself.

    With keys the pack must be signed by one of them: else its logs may be anybody's, whoever signed the records in it.
    """
    if path.suffix != ".zip" and not (path / INDEX).is_file():
        yield path
        return
    from avalanche_amnesia.lab.packs.pack import StatePack  # lazy: torch takes seconds, and folders need none

    pack, refused = None, list[Exception]()
    for key in public_keys or (None,):
        try:
            pack = StatePack(path, public_key=key)
            break
        except StateError as error:
            refused.append(error)
    if pack is None:
        raise refused[-1]
    with tempfile.TemporaryDirectory() as made:
        yield pack.unpack(Path(made) / "runs", states=False)
