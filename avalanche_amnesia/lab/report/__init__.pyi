from .reading import entries as entries
from .reading import read_run as read_run
