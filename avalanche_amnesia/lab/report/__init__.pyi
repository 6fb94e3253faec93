from .measures import COLUMNS as COLUMNS
from .page import report_page as report_page
from .reading import Moment as Moment
from .reading import Run as Run
from .reading import read_run as read_run
from .reading import read_runs as read_runs
