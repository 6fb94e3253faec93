from .record import ProofError as ProofError
from .record import UnlearningRecord as UnlearningRecord
from .record import verify as verify
