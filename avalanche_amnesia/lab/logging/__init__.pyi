from .json_lines import JSONLogger as JSONLogger
from .run_lines import JSONRunError as JSONRunError
from .sync import sync as sync
