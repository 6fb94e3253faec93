"""Strategies and plugins: HAT, AdaHAT, AmnesiacHAT, WSN, trajectories and unlearning for any Avalanche strategy."""

from avalanche_amnesia.training.adahat import AdaHAT
from avalanche_amnesia.training.amnesiac_hat import AmnesiacHAT
from avalanche_amnesia.training.hat import HAT
from avalanche_amnesia.training.plugins import (
    PAPER_ALPHA,
    AdaHATPlugin,
    BackupPlugin,
    CounterfactualPlugin,
    DarkReplayPlugin,
    DivergedError,
    HATPlugin,
    InMemoryLoaderPlugin,
    RepairPlugin,
    ScaledUpdatesPlugin,
    SeedingPlugin,
    SubnetPlugin,
    TaskError,
    TrajectoryPlugin,
    UnlearningPlugin,
    find_plugin,
)
from avalanche_amnesia.training.pools import CapacityError
from avalanche_amnesia.training.remaining import remaining_experiences
from avalanche_amnesia.training.wsn import WSN

__all__ = [
    "HAT",
    "PAPER_ALPHA",
    "WSN",
    "AdaHAT",
    "AdaHATPlugin",
    "AmnesiacHAT",
    "BackupPlugin",
    "CapacityError",
    "CounterfactualPlugin",
    "DarkReplayPlugin",
    "DivergedError",
    "HATPlugin",
    "InMemoryLoaderPlugin",
    "RepairPlugin",
    "ScaledUpdatesPlugin",
    "SeedingPlugin",
    "SubnetPlugin",
    "TaskError",
    "TrajectoryPlugin",
    "UnlearningPlugin",
    "find_plugin",
    "remaining_experiences",
]
