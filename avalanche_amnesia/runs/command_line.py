"""The command line: ``amnesia demo`` (or ``python -m avalanche_amnesia demo``)."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the words behind the program's name; those it was called with by default.

    Returns:
        The exit status: 0, or 2 for input that can't be used.
    """
    parser = argparse.ArgumentParser(prog="amnesia", description="Continual learning that can forget on request.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="the main job: digits, requests, three strategies, figures and a table")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results (%(default)s)")
    demo.add_argument("--data-root", default=None, help="run on MNIST below this folder instead of the embedded digits")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--epochs", type=int, default=None, help="per task (20 on digits, 2 on MNIST)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("WANDB_SILENT", "true")
    warnings.filterwarnings("ignore", category=UserWarning, module="avalanche")
    from avalanche_amnesia.runs.demo import run_demo  # the host takes seconds to import: not for --help

    try:
        run_demo(options.out, data_root=options.data_root, seed=options.seed, epochs=options.epochs)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"amnesia: {error}\n")
        return 2
    return 0
