from .pools import CapacityError as CapacityError
