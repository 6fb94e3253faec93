"""Taking tasks out of a model: who may be asked for, what they changed, and how it goes."""

from avalanche_amnesia.unlearning.auditing import AuditReport, Finding, audit
from avalanche_amnesia.unlearning.compensation import Compensation, RevisingCompensation
from avalanche_amnesia.unlearning.evidence import Evidence
from avalanche_amnesia.unlearning.fingerprint import Fingerprint
from avalanche_amnesia.unlearning.ledger import RequestError, TaskLedger
from avalanche_amnesia.unlearning.log_files import TrajectoryError
from avalanche_amnesia.unlearning.operation import apply, book_only
from avalanche_amnesia.unlearning.planning import Preparation, own_modules_only, prepare
from avalanche_amnesia.unlearning.purging import (
    PurgeContext,
    SavedState,
    StateAdapter,
    UnknownStateError,
    adapter_of,
    register_adapter,
    register_purger,
)
from avalanche_amnesia.unlearning.record import (
    Measurement,
    Provenance,
    RecordError,
    RepairSummary,
    SharedEntries,
    TensorChange,
    UnlearningPlan,
    UnlearningRecord,
)
from avalanche_amnesia.unlearning.removal import Removal
from avalanche_amnesia.unlearning.repair import Repair
from avalanche_amnesia.unlearning.revision import Revision, Revisions
from avalanche_amnesia.unlearning.signing import SigningError, verify
from avalanche_amnesia.unlearning.subject import Subject, refuse_unknown_state
from avalanche_amnesia.unlearning.task_modules import (
    own_parameters,
    remove_task_modules,
    shared_state,
    shared_statistics,
)
from avalanche_amnesia.unlearning.trajectory import Trajectory

__all__ = [
    "AuditReport",
    "Compensation",
    "Evidence",
    "Finding",
    "Fingerprint",
    "Measurement",
    "Preparation",
    "Provenance",
    "PurgeContext",
    "RecordError",
    "Removal",
    "Repair",
    "RepairSummary",
    "RequestError",
    "RevisingCompensation",
    "Revision",
    "Revisions",
    "SavedState",
    "SharedEntries",
    "SigningError",
    "StateAdapter",
    "Subject",
    "TaskLedger",
    "TensorChange",
    "Trajectory",
    "TrajectoryError",
    "UnknownStateError",
    "UnlearningPlan",
    "UnlearningRecord",
    "adapter_of",
    "apply",
    "audit",
    "book_only",
    "own_modules_only",
    "own_parameters",
    "prepare",
    "refuse_unknown_state",
    "register_adapter",
    "register_purger",
    "remove_task_modules",
    "shared_state",
    "shared_statistics",
    "verify",
]
