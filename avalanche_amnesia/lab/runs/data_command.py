"""Command on data sets: ``amnesia data``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.parser import Commands


def add_data_command(commands: Commands) -> None:
    """Add the command to the program's."""
    data = commands.add("data", _data, "data sets: which there are, where they lie, and to download them")
    data.add_argument("--data-root", type=Path, default=None, help="folder with data sets, or AMNESIA_DATA")
    data.add_argument("--download", nargs="+", metavar="NAME", default=[], help="let torchvision fetch these")


def _data(options: Namespace) -> int:
    from avalanche_amnesia.benchmarks.data_root import ENVIRONMENT, data_root
    from avalanche_amnesia.checks import known_options
    from avalanche_amnesia.lab.runs.catalogue import DATA_SETS  # the host takes seconds to import: not for --help

    known_options(options.download, DATA_SETS, "the list of data sets")
    given = options.data_root or os.environ.get(ENVIRONMENT)
    root = Path(given) if given else None
    for name in options.download:
        DATA_SETS[name].download(data_root("amnesia data --download", root, "data sets"))
    sys.stdout.write("no data root: give --data-root, or set AMNESIA_DATA\n" if root is None else f"{root}\n")
    for data in DATA_SETS.values():
        there = not data.place or (root is not None and data.is_there(root))
        state = "there" if there else "--download" if data.downloads else "missing"
        sys.stdout.write(f"{data.name:15}{state:11}{data.content} ({', '.join(data.streams)})\n")
    return 0
