from .pools import CapacityError as CapacityError
from .pools import CapacityWarning as CapacityWarning
from .pools import Pools as Pools
