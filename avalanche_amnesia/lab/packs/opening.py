"""Folders and packs of runs, read alike."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from avalanche_amnesia.lab.packs.index import INDEX


@contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """Folder with the logs, records and settings in a pack, while the block lasts; else it is the path itself."""
    if path.suffix != ".zip" and not (path / INDEX).is_file():
        yield path
        return
    from avalanche_amnesia.lab.packs.pack import StatePack  # lazy: torch takes seconds, and folders need none

    with tempfile.TemporaryDirectory() as made:
        yield StatePack(path).unpack(Path(made) / "runs", states=False)
