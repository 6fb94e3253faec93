from .values import StateError as StateError
from .values import checked as checked
