"""Findings of a search of files, in sentences for people who must answer for it."""

from collections.abc import Iterator
from pathlib import Path

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.audit.words import date_in_words, gone_in_words
from avalanche_amnesia.contrib.residue_search.scan import AuditReport
from avalanche_amnesia.saving.files import STATE


def verdict(report: AuditReport, record: UnlearningRecord, path: Path) -> list[str]:
    """Residue folder by folder, and what to do about it; or that nothing was found, and how far that goes.

    Args:
        report: of the files at ``path``.
        record: of the unlearning.
        path: file or folder that was looked through.
    """
    gone = gone_in_words(record.plan)
    if report.clean:
        told = [f"Nothing of {gone} was found in {path}, among {report.looked_at} tensors, data sets and logs."]
    else:
        told = list(_of_places(report, gone, date_in_words(record.time)))
    if report.unread:
        told.append(f"{len(report.unread)} files can't be looked into: see to them yourself.")
    if record.fingerprint is None:
        told.append("The record has no fingerprint, so that only exact copies were looked for.")
    return told


def _of_places(report: AuditReport, gone: str, day: str) -> Iterator[str]:
    """A sentence for each folder of a state, and for each other file."""
    places: dict[Path, list[tuple[str, str]]] = {}
    for finding in report.findings:
        name, _, inside = finding.path.partition(": ")
        file = Path(name)
        place = file.parent if (file.parent / STATE).is_file() else file
        places.setdefault(place, []).append((finding.kind, inside))
    for place, found in places.items():
        kinds = {kind for kind, _ in found}
        what = "a state" if place.is_dir() else "a model"
        if "state before" in kinds or any(inside.startswith("model.") for _, inside in found):
            yield f"{place} holds {what} from before the request of {day}: delete it."
        elif kinds == {"log"}:
            yield f"{place} shows {gone} in pictures or histograms: delete it, or these lines."
        elif kinds <= {"update"}:
            yield f"{place} holds values that {gone} had changed: delete it, or unlearn there too."
        else:
            yield f"{place} still holds something of {gone} alone: delete it, or save it anew without."
