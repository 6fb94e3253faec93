"""Send runs logged as JSON lines to W&B; sending a run again creates no second run."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, lines_of
from avalanche_amnesia.saving.files import replace_file

SENT = "sent.json"
"""File in a run's folder with the hash and the target of the content sent last."""


@dataclass(frozen=True)
class Outcome:
    """Result of sending one run to W&B."""

    run: Path
    result: Literal["sent", "unchanged", "failed"]
    message: str

    def __str__(self) -> str:
        return f"{self.run}: {self.message}"


def sync(paths: Iterable[str | Path], *, project: str | None = None, mode: str | None = None) -> list[Outcome]:
    """Send every run below the given folders to W&B.

    The identifier in a run's first line makes it one run at W&B: if it is sent again, it is skipped if unchanged, and
    replaces the earlier version otherwise. In mode "offline" it is written as an offline run of W&B to its own folder;
    send it with ``wandb sync`` like any offline run.

    Args:
        paths: folders that contain runs at any depth.
        project: W&B project for all runs; None: the project named in each run.
        mode: "online", "offline", or None: the default of ``WandBLogger``.

    Returns:
        One outcome per run; a failed run does not stop the rest.

    Raises:
        FileNotFoundError: a folder does not exist, or has no run; nothing was sent.
        ValueError: the mode is unknown or "disabled".
    """
    json_runs: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}: give folders that hold runs")
        if not (here := sorted(file.parent for file in path.rglob(RUN_FILE))):
            raise FileNotFoundError(f"{path} holds no {RUN_FILE} of a JSONLogger; `wandb sync` sends runs of W&B")
        json_runs |= dict.fromkeys(here)
    from avalanche_amnesia.logging.wandb import resolve_mode  # lazy: not needed to report a wrong folder

    run_mode = resolve_mode(mode)
    if run_mode == "disabled":
        raise ValueError("mode 'disabled' sends nothing: pass 'online' or 'offline', or unset WANDB_MODE")
    return [_send(folder, project, run_mode) for folder in json_runs]


def _send(folder: Path, project: str | None, mode: str) -> Outcome:
    try:
        head = next(lines_of(folder))
        digest = hashlib.sha256((folder / RUN_FILE).read_bytes()).hexdigest()
        target = {"content": digest, "project": project or head["project"], "mode": mode, "run": head["id"]}
        sent, content = folder / SENT, (json.dumps(target) + "\n").encode()
        if sent.is_file() and sent.read_bytes() == content:
            return Outcome(folder, "unchanged", f"run {head['id']} was sent before ({mode}), nothing was added")
        rows = _write_run(folder, head, target)
    except Exception as error:  # W&B raises many classes of errors; send the remaining runs anyway
        return Outcome(folder, "failed", f"failed, {type(error).__name__}: {error}")
    replace_file(sent, content)
    where = "sent to" if mode == "online" else "written as an offline run of"
    return Outcome(folder, "sent", f"{rows} rows {where} project {target['project']}, run {head['id']}")


def _write_run(folder: Path, head: dict[str, Any], target: dict[str, Any]) -> int:
    """Send a logged run to W&B, delete its earlier offline version, and return its number of rows."""
    import wandb

    from avalanche_amnesia.lab.logging.json_lines import copy_run
    from avalanche_amnesia.logging.wandb import WandBWriter

    rows = sum(line["kind"] == "row" for line in lines_of(folder))  # raises for a broken log before anything is sent
    for old in folder.glob(f"wandb/offline-run-*-{head['id']}"):
        shutil.rmtree(old)
    run = wandb.init(
        # Without resume=, W&B replaces an earlier run of this identifier.
        **{name: head[name] for name in ("id", "name", "group", "job_type", "config")},
        project=target["project"],
        mode=target["mode"],
        dir=str(folder),
        reinit="create_new",
    )
    ended, writer = False, WandBWriter(run)
    try:
        ended = copy_run(folder, writer)
    finally:
        if not ended:  # the run was killed or sending failed: mark it as failed at W&B
            writer.finish(1)
    return rows
