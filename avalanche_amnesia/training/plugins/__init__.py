"""Avalanche plugins: masking, adjustment, trajectories, unlearning, and what keeps runs reproducible."""

from avalanche_amnesia.training.plugins.adahat import PAPER_ALPHA, AdaHATPlugin
from avalanche_amnesia.training.plugins.backup import BackupPlugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.dark_replay import DarkReplayPlugin
from avalanche_amnesia.training.plugins.loading import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.lookup import find_plugin
from avalanche_amnesia.training.plugins.masking import HATPlugin
from avalanche_amnesia.training.plugins.repair import RepairPlugin
from avalanche_amnesia.training.plugins.scaling import ScaledUpdatesPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.shared_counterfactual import SharedHeadCounterfactualPlugin
from avalanche_amnesia.training.plugins.subnetwork import SubnetPlugin
from avalanche_amnesia.training.plugins.task_mask import DivergedError, TaskError, TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

__all__ = [
    "PAPER_ALPHA",
    "AdaHATPlugin",
    "BackupPlugin",
    "CounterfactualPlugin",
    "DarkReplayPlugin",
    "DivergedError",
    "HATPlugin",
    "InMemoryLoaderPlugin",
    "RepairPlugin",
    "ScaledUpdatesPlugin",
    "SeedingPlugin",
    "SharedHeadCounterfactualPlugin",
    "SubnetPlugin",
    "TaskError",
    "TaskMaskPlugin",
    "TrajectoryPlugin",
    "UnlearningPlugin",
    "find_plugin",
]
