"""Avalanche plugins: masking, adjustment, trajectories, unlearning, and what keeps runs reproducible."""

from avalanche_amnesia.training.plugins.adahat import PAPER_ALPHA, AdaHATPlugin
from avalanche_amnesia.training.plugins.loading import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.lookup import find_plugin
from avalanche_amnesia.training.plugins.masking import DivergedError, HATPlugin, TaskError
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

__all__ = [
    "PAPER_ALPHA",
    "AdaHATPlugin",
    "DivergedError",
    "HATPlugin",
    "InMemoryLoaderPlugin",
    "SeedingPlugin",
    "TaskError",
    "TrajectoryPlugin",
    "UnlearningPlugin",
    "find_plugin",
]
