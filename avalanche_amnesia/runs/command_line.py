"""The command line: ``amnesia demo``, ``report``, ``audit``, ``unlearn``, ``verify``, ``plan``, ``prune``, ``sync``.

The same as ``python -m avalanche_amnesia demo`` and so on.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from avalanche_amnesia.runs.report_command import add_report_command
from avalanche_amnesia.runs.state_commands import add_state_commands
from avalanche_amnesia.runs.store_commands import add_store_commands
from avalanche_amnesia.runs.sync_command import add_sync_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the words behind the program's name; those it was called with by default.

    Returns:
        The exit status: 0; 130 when interrupted by Ctrl-C; 2 for input that can't be used; of an audit 1 for residue,
        and 3 where none was found but some files can't be looked into; of a verification 1 where a state is not as the
        record says; of a sync 1 where a run could not be sent.
    """
    parser = argparse.ArgumentParser(prog="amnesia", description="Continual learning that can forget on request.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="the main job: digits, requests, four strategies, and a report")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results (%(default)s)")
    demo.add_argument("--data-root", default=None, help="run on MNIST below this folder instead of the embedded digits")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--epochs", type=int, default=None, help="per task (20 on digits, 2 on MNIST)")
    demo.add_argument("--store", type=Path, default=None, help="keep references here; started again, it goes on")
    demo.set_defaults(run=_demo)
    add_report_command(commands)
    _add_audit(commands)
    add_state_commands(commands)
    add_store_commands(commands)
    add_sync_command(commands)
    options = parser.parse_args(arguments)
    os.environ.setdefault("WANDB_SILENT", "true")
    warnings.filterwarnings("ignore", category=UserWarning, module="avalanche")
    try:
        status: int = options.run(options)
        return status
    except (OSError, ValueError) as error:
        sys.stderr.write(f"amnesia: {error}\n")
        return 2
    except KeyboardInterrupt:
        kept = getattr(options, "store", None) if options.command == "demo" else None
        goes_on = "starts again" if kept is None else f"goes on with the references in {kept}"
        sys.stderr.write(f"amnesia: interrupted, no result was written; the same command {goes_on}\n")
        return 130


def _demo(options: argparse.Namespace) -> int:
    from avalanche_amnesia.runs.demo import run_demo  # the host takes seconds to import: not for --help

    run_demo(options.out, data_root=options.data_root, seed=options.seed, epochs=options.epochs, store=options.store)
    return 0


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser("audit", help="look through files for what is left of unlearned tasks")
    audit.add_argument("path", type=Path, metavar="DIRECTORY", help="folder (or file) to look through")
    audit.add_argument("--record", type=Path, required=True, help="JSON file of the unlearning, signed or not")
    audit.add_argument("--public-key", type=Path, default=None, help="PEM file of the record's signer, to verify it")
    audit.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    from avalanche_amnesia.audit.record import UnlearningRecord
    from avalanche_amnesia.audit.scan import audit
    from avalanche_amnesia.audit.signing import verify

    if options.public_key is None:
        record = UnlearningRecord.load(options.record)
    else:
        record = verify(options.record.read_text(), options.public_key.read_bytes())
    report = audit(options.path, record)
    sys.stdout.write(report.table() + "\n")
    if not report.clean:
        return 1
    return 3 if report.unread else 0
