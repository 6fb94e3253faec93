"""Loggers and dashboards: Weights & Biases, offline runs read back."""

from avalanche_amnesia.logging.offline import OfflineRun, OfflineRunError, read_offline_run
from avalanche_amnesia.logging.wandb import WandBLogger

__all__ = ["OfflineRun", "OfflineRunError", "WandBLogger", "read_offline_run"]
