"""Taking tasks out of a model: who may be asked for, what they changed, and how it goes."""

from avalanche_amnesia.unlearning.compensation import Compensation
from avalanche_amnesia.unlearning.ledger import RequestError, TaskLedger
from avalanche_amnesia.unlearning.log_files import TrajectoryError
from avalanche_amnesia.unlearning.operation import Preparation, Subject, apply, book_only, prepare
from avalanche_amnesia.unlearning.purge import PurgeContext, register_purger
from avalanche_amnesia.unlearning.record import (
    RepairSummary,
    SharedEntries,
    TensorChange,
    UnlearningPlan,
    UnlearningRecord,
)
from avalanche_amnesia.unlearning.repair import Repair
from avalanche_amnesia.unlearning.task_modules import own_parameters, remove_task_modules, shared_statistics
from avalanche_amnesia.unlearning.trajectory import Removal, Trajectory

__all__ = [
    "Compensation",
    "Preparation",
    "PurgeContext",
    "Removal",
    "Repair",
    "RepairSummary",
    "RequestError",
    "SharedEntries",
    "Subject",
    "TaskLedger",
    "TensorChange",
    "Trajectory",
    "TrajectoryError",
    "UnlearningPlan",
    "UnlearningRecord",
    "apply",
    "book_only",
    "own_parameters",
    "prepare",
    "register_purger",
    "remove_task_modules",
    "shared_statistics",
]
