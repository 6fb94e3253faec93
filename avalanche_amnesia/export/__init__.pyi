from .dense import extract as extract
from .report import SubnetReport as SubnetReport
from .report import subnet_report as subnet_report
