from .json_lines import JSONLogger as JSONLogger
from .sync import sync as sync
