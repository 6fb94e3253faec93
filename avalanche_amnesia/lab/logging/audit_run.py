"""A run for an audit: its findings, and the record of the unlearning that it looked into."""

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.contrib.residue_search.scan import AuditReport
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.logging.run_logger import RunLogger

FINDINGS = "Audit/findings"


def log_audit(logger: RunLogger, report: AuditReport, record: UnlearningRecord) -> None:
    """Log an audit to a run of its own, which names the audited record as what it used.

    Online, W&B draws the line from the run that unlearned to this one: records are artefacts named by their content. A
    W&B run in offline mode can't use an artefact: only its configuration names it then. Log to a ``JSONLogger`` where
    there is no network, and ``amnesia sync`` draws the line when the run is sent.

    Args:
        logger: of a new run, made with ``job_type="audit"``; stays open.
        report: of the audit.
        record: that it was given.
    """
    logger.use_record(record)
    rows = tuple((finding.kind, finding.strength, finding.name, finding.path) for finding in report.findings)
    logger.log_values(
        {
            FINDINGS: Table(("kind", "strength", "of", "where"), rows),
            "Audit/n_findings": len(report.findings),
            "Audit/looked_at": report.looked_at,
            "Audit/unread": len(report.unread),
            "Audit/tasks": ", ".join(map(str, record.tasks)),
            "Audit/verdict": "residue found" if not report.clean else "clean" if not report.unread else "not all read",
        }
    )
