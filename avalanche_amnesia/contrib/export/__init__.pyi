from .dense import extract as extract
from .subnet_report import SubnetReport as SubnetReport
from .subnet_report import subnet_report as subnet_report
