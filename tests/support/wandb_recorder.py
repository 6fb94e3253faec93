"""A logger on an offline run in a folder, and what it has written."""

from pathlib import Path
from typing import Any

from avalanche_amnesia.logging import WandBLogger
from support.logged_runs import LoggedRun
from support.wandb_files import read_offline_run


def run_folders(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


class Recorder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logger = WandBLogger(dir=folder, mode="offline", project="digits", name="one")

    def log(self, name: str, value: Any, iteration: int = 0) -> None:
        self.logger.log_single_metric(name, value, iteration)

    def read(self) -> LoggedRun:
        self.logger.finish()
        return read_offline_run(self.run_folder)

    @property
    def run_folder(self) -> Path:
        (found,) = run_folders(self.folder)
        return found
