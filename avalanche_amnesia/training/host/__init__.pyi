from .lookup import find_plugin as find_plugin
from .remaining import remaining_experiences as remaining_experiences
