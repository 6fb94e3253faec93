"""A task's dense subnet: the plain network that is left when all units outside the task's mask are taken out."""

from avalanche_amnesia.models.extraction.extract import extract
from avalanche_amnesia.models.extraction.report import SubnetReport, subnet_report

__all__ = ["SubnetReport", "extract", "subnet_report"]
