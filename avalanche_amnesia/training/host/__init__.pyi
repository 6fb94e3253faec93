from .lookup import find_plugin as find_plugin
from .lookup import remaining_experiences as remaining_experiences
