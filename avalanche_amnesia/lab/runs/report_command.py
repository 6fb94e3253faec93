"""Command on results of runs: ``amnesia report``."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.parser import Commands


def add_report_command(commands: Commands) -> None:
    """Add the command to the program's."""
    report = commands.add("report", _report, "one page: what was forgotten, was it really, what did it cost; or tables")
    report.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="folder with runs (run.jsonl), at any depth; those that differ in the seed alone are shown as one",
    )
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (%(default)s)")
    report.add_argument(
        "--tables",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="in place of the page: CSV, Markdown, figures and JSON per seed of all runs of amnesia sweep in one DIR",
    )


def _report(options: Namespace) -> int:
    if options.tables is not None:
        return _tables(options)
    from avalanche_amnesia.lab.report.page import report_page
    from avalanche_amnesia.lab.report.reading import read_runs
    from avalanche_amnesia.saving.replacing import replace_file

    runs = [run for folder in options.folders for run in read_runs(folder)]
    page = report_page(runs).encode()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.out, page)
    sys.stdout.write(f"{options.out}: {len(page):,} bytes, {len(runs)} run(s)\n")
    return 0


def _tables(options: Namespace) -> int:
    from avalanche_amnesia.lab.study.tables import write_tables

    if len(options.folders) > 1:
        raise ValueError(f"--tables takes one DIR with all runs below it, got {len(options.folders)}")
    for file in write_tables(options.folders[0], options.tables):
        sys.stdout.write(f"{file}: {file.stat().st_size:,} bytes\n")
    return 0
