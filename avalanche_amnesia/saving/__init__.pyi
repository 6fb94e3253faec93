from .encoding import Apart as Apart
from .encoding import checked as checked
from .files import StateError as StateError
