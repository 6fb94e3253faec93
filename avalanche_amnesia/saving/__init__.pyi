from .classes import saveable as saveable
from .files import StateError as StateError
