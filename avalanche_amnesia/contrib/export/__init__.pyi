from .dense import SubnetReport as SubnetReport
from .dense import extract as extract
from .dense import subnet_report as subnet_report
