from .audit_report import AuditReport as AuditReport
from .audit_report import Finding as Finding
from .evidence import Evidence as Evidence
from .scan import audit as audit
