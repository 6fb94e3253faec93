"""Runs of JSON lines sent to W&B, each as one run, however often."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, lines_of
from avalanche_amnesia.saving.files import replace_file

SENT = "sent.json"
"""File in a run's folder that says what of it was sent where."""


@dataclass(frozen=True)
class Outcome:
    """Result of sending one run."""

    run: Path
    result: Literal["sent", "unchanged", "failed"]
    message: str

    def __str__(self) -> str:
        return f"{self.run}: {self.message}"


def sync(paths: Iterable[str | Path], *, project: str | None = None, mode: str | None = None) -> list[Outcome]:
    """Send every run below some folders to W&B.

    A run of JSON lines keeps the identifier of its first line, so that it is one run at W&B: sent again it is left out
    if nothing was added, and replaces what was sent else. In mode "offline" it becomes a W&B offline run in its own
    folder, which ``wandb sync`` sends, as any other offline run.

    Args:
        paths: folders of runs, or folders that hold some at any depth.
        project: W&B project for all of them; None: the one that each names.
        mode: "online", "offline", or None: as for a ``WandBLogger``.

    Returns:
        One outcome per run; a run that fails does not keep the others.

    Raises:
        FileNotFoundError: a folder does not exist, or has no run; nothing was sent.
        ValueError: for another mode.
    """
    json_runs: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}: give folders that hold runs")
        here = sorted(file.parent for file in path.rglob(RUN_FILE))
        if not here:
            raise FileNotFoundError(
                f"{path} holds no run: no {RUN_FILE} of a JSONLogger; offline runs of W&B are sent by `wandb sync`"
            )
        json_runs |= dict.fromkeys(here)
    from avalanche_amnesia.logging.wandb import resolve_mode  # lazy: a wrong folder is told before the host is loaded

    run_mode = resolve_mode(mode)
    if run_mode == "disabled":
        raise ValueError("mode 'disabled' sends nothing: pass 'online' or 'offline', or unset WANDB_MODE")
    return [_send(folder, project, run_mode) for folder in json_runs]


def _send(folder: Path, project: str | None, mode: str) -> Outcome:
    try:
        head = next(lines_of(folder))
        target = {
            "content": hashlib.sha256((folder / RUN_FILE).read_bytes()).hexdigest(),
            "project": project or head["project"],
            "mode": mode,
            "run": head["id"],
        }
        if _sent_before(folder) == target:
            return Outcome(folder, "unchanged", f"run {head['id']} was sent before ({mode}), nothing was added")
        rows = _write(folder, head, target)
    except Exception as error:  # W&B raises what it likes; the other runs must not suffer
        return Outcome(folder, "failed", f"failed, {type(error).__name__}: {error}")
    replace_file(folder / SENT, (json.dumps(target) + "\n").encode())
    where = "sent to" if mode == "online" else "written as an offline run of"
    return Outcome(folder, "sent", f"{rows} rows {where} project {target['project']}, run {head['id']}")


def _sent_before(folder: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads((folder / SENT).read_text())
    return None


def _write(folder: Path, head: dict[str, Any], target: dict[str, Any]) -> int:
    """Write a run to W&B; what an earlier, or interrupted, sending made of it offline goes."""
    import wandb

    from avalanche_amnesia.lab.logging.json_lines import replay
    from avalanche_amnesia.logging.wandb import WandBWriter

    rows = sum(line["kind"] == "row" for line in lines_of(folder))  # all of it can be read, or nothing is sent
    for old in folder.glob(f"wandb/offline-run-*-{head['id']}"):
        shutil.rmtree(old)
    run = wandb.init(
        # Without resume=, a run of this identifier is written again from its beginning.
        **{name: head[name] for name in ("id", "name", "group", "job_type", "config", "tags")},
        project=target["project"],
        mode=target["mode"],
        dir=str(folder),
        reinit="create_new",
    )
    ended, writer = False, WandBWriter(run)
    try:
        ended = replay(folder, writer)
    finally:
        if not ended:  # killed, or not to be sent: a failed one
            writer.finish(1)
    return rows
