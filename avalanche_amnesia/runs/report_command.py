"""Command on results of runs: ``amnesia report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_report_command(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    report = commands.add_parser("report", help="one page: what was forgotten, was it really, what did it cost")
    report.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folder with results.json, one per run; runs whose settings differ in the seed alone are shown as one",
    )
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (%(default)s)")
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from avalanche_amnesia.logging.report.page import report_page
    from avalanche_amnesia.logging.report.reading import read_results
    from avalanche_amnesia.saving.replacing import replace_file

    page = report_page([read_results(folder) for folder in options.folders]).encode()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.out, page)
    sys.stdout.write(f"{options.out}: {len(page):,} bytes, {len(options.folders)} run(s)\n")
    return 0
