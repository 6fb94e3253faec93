from .claims import TamperedError as TamperedError
from .compensation import Compensation as Compensation
from .compensation import RevisingCompensation as RevisingCompensation
from .purging import PurgeContext as PurgeContext
from .purging import UnknownStateError as UnknownStateError
from .purging import register_purger as register_purger
