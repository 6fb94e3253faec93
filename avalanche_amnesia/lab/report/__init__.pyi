from .page import report_page as report_page
from .reading import Results as Results
from .reading import read_results as read_results
