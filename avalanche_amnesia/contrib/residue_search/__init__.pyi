from .audit_report import AuditReport as AuditReport
from .audit_report import Finding as Finding
from .evidence import take_evidence as take_evidence
from .evidence import take_fingerprint as take_fingerprint
from .scan import audit as audit
