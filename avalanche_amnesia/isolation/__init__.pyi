from .pools import CapacityError as CapacityError
from .pools import Pools as Pools
