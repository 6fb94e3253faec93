from .evidence import take_evidence as take_evidence
from .evidence import take_fingerprint as take_fingerprint
from .scan import AuditReport as AuditReport
from .scan import Finding as Finding
from .scan import audit as audit
from .verdict import verdict as verdict
