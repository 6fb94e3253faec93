"""Command that sends runs to W&B: ``amnesia sync``."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.parser import Commands


def add_sync_command(commands: Commands) -> None:
    """Add the command to the program's."""
    sync = commands.add("sync", _sync, "send runs of JSON lines, and offline runs of W&B, to W&B")
    sync.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="folder of a run, or of runs at any depth")
    sync.add_argument("--project", default=None, help="W&B project for all of them (default: the one each run names)")
    sync.add_argument(
        "--mode",
        choices=("online", "offline"),
        default=None,
        help="offline: make W&B's offline runs of them (default: WANDB_MODE, else online if a key is configured)",
    )


def _sync(options: Namespace) -> int:
    from avalanche_amnesia.lab.logging.sync import sync  # W&B takes seconds to import: not for --help

    outcomes = sync(options.folders, project=options.project, mode=options.mode)
    for outcome in outcomes:
        sys.stdout.write(f"{outcome}\n")
    return 1 if any(outcome.result == "failed" for outcome in outcomes) else 0
