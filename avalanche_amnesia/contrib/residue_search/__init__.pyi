from .recognition import take_evidence as take_evidence
from .recognition import take_fingerprint as take_fingerprint
from .scan import AuditReport as AuditReport
from .scan import Finding as Finding
from .scan import audit as audit
from .scan import verdict as verdict
