"""The command line: ``amnesia demo``, ``run``, ``sweep``, ``report`` and so on.

The same as ``python -m avalanche_amnesia demo`` and so on.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.data_command import add_data_command
from avalanche_amnesia.lab.runs.experiment_file import expanded
from avalanche_amnesia.lab.runs.parser import Commands
from avalanche_amnesia.lab.runs.report_command import add_report_command
from avalanche_amnesia.lab.runs.state_commands import add_state_commands
from avalanche_amnesia.lab.runs.store_commands import add_store_commands
from avalanche_amnesia.lab.runs.study_commands import USES_EXPERIMENT, add_study_commands
from avalanche_amnesia.lab.runs.sync_command import add_sync_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    commands = Commands()
    _add_demo(commands)
    add_study_commands(commands)
    add_report_command(commands)
    add_state_commands(commands)
    add_store_commands(commands)
    add_sync_command(commands)
    add_data_command(commands)
    os.environ.setdefault("WANDB_SILENT", "true")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = Namespace()
    try:
        run, options = commands.parse(expanded(words) if _names_experiment(words) else words)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"avalanche\.")
        return run(options)
    except (OSError, ValueError, TypeError, ImportError) as error:
        sys.stderr.write(f"amnesia: {error}\n")
        return 2
    except KeyboardInterrupt:
        kept = getattr(options, "store", None) if words[:1] != ["prune"] else None
        goes_on = "starts again" if kept is None else f"goes on with the references in {kept}"
        written = "finished runs are kept" if words[:1] == ["sweep"] else "no result was written"
        sys.stderr.write(f"amnesia: interrupted, {written}; the same command {goes_on}\n")
        return 130


def _names_experiment(words: Sequence[str]) -> bool:
    """Tell whether a command is about an experiment's file; ``plan`` knows scripts as well."""
    of_script = words[:1] == ["plan"] and not any(word.endswith((".yaml", ".yml")) for word in words)
    return words[:1] != [] and words[0] in USES_EXPERIMENT and not of_script


def _add_demo(commands: Commands) -> None:
    demo = commands.add("demo", _demo, "the main job: digits, requests, four strategies, and a report")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results (%(default)s)")
    demo.add_argument("--data-root", default=None, help="run on MNIST below this folder instead of the embedded digits")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--epochs", type=int, default=None, help="per task (20 on digits, 2 on MNIST)")
    demo.add_argument("--store", type=Path, default=None, help="keep references here; started again, it goes on")


def _demo(options: Namespace) -> int:
    from avalanche_amnesia.lab.runs.demo import run_demo  # the host takes seconds to import: not for --help

    run_demo(options.out, data_root=options.data_root, seed=options.seed, epochs=options.epochs, store=options.store)
    return 0
