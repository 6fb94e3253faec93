from .audit_run import log_audit as log_audit
from .json_lines import JSONLogger as JSONLogger
from .json_lines import JSONRunError as JSONRunError
from .json_lines import LoggedRun as LoggedRun
from .json_lines import read_json_run as read_json_run
from .sync import sync as sync
