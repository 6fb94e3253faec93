from .applying import BrokenPluginError as BrokenPluginError
from .claims import TamperedError as TamperedError
from .compensation import Compensation as Compensation
from .purging import UnknownStateError as UnknownStateError
from .purging import register_purger as register_purger
