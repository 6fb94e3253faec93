"""Looking for what is left of unlearned tasks, in a strategy's objects and in files."""

from avalanche_amnesia.unlearning.auditing.audit import audit
from avalanche_amnesia.unlearning.auditing.report import AuditReport, Finding

__all__ = ["AuditReport", "Finding", "audit"]
