"""Strategies and plugins: HAT, AdaHAT, AmnesiacHAT, trajectories and unlearning for any Avalanche strategy."""

from avalanche_amnesia.training.adahat import AdaHAT
from avalanche_amnesia.training.amnesiac_hat import AmnesiacHAT
from avalanche_amnesia.training.hat import HAT
from avalanche_amnesia.training.plugins import (
    PAPER_ALPHA,
    AdaHATPlugin,
    DivergedError,
    HATPlugin,
    InMemoryLoaderPlugin,
    SeedingPlugin,
    TaskError,
    TrajectoryPlugin,
    UnlearningPlugin,
)
from avalanche_amnesia.training.plugins.unlearning import remaining_experiences

__all__ = [
    "HAT",
    "PAPER_ALPHA",
    "AdaHAT",
    "AdaHATPlugin",
    "AmnesiacHAT",
    "DivergedError",
    "HATPlugin",
    "InMemoryLoaderPlugin",
    "SeedingPlugin",
    "TaskError",
    "TrajectoryPlugin",
    "UnlearningPlugin",
    "remaining_experiences",
]
