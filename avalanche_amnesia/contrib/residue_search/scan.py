"""The audit: everything reachable from a strategy, or every file below a folder, against a record."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.audit.words import as_html, date_in_words, gone_in_words, wrapped
from avalanche_amnesia.contrib.residue_search.file_contents import UnreadableFileError, contents, is_text
from avalanche_amnesia.contrib.residue_search.recognition import Evidence, Recogniser
from avalanche_amnesia.object_walk import reachable
from avalanche_amnesia.saving.files import STATE
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.sparse import SparseValues


@dataclass(frozen=True)
class Finding:
    """One place where something of an unlearned task is left.

    Attributes:
        path: to the object (``strategy.plugins[3].saved_params[1]``) or to the file and the tensor in it.
        kind: what it is: ``own tensor``, ``mask``, ``state before``, ``update``, ``sample``, ``data set``, ``name`` (a
            tensor called like one that was removed) or ``log``.
        name: the tensor, or task, of which it is a copy or a part.
        strength: 1 for a copy; of an update how much of it is held, or its correlation.
    """

    path: str
    kind: str
    name: str
    strength: float


@dataclass(frozen=True)
class AuditReport:
    """All findings of an audit.

    Attributes:
        findings: in the order of the paths.
        looked_at: how many tensors, data sets and texts were looked at.
        unread: files that can't be looked into without running code from them, or that are broken.
    """

    findings: tuple[Finding, ...]
    looked_at: int
    unread: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Tell whether nothing was found; see ``unread`` for where nothing could be looked for."""
        return not self.findings

    def table(self) -> str:
        """The findings as lines of text, of at most 60 columns."""
        lines = [f"{self.looked_at} tensors, data sets and logs looked at: {self._summary()}"]
        lines += [f"{f.kind} of {f.name}, strength {f.strength:.2f}, in {f.path}" for f in self.findings]
        lines += [f"not looked into: {path}" for path in self.unread]
        return "\n".join(part for line in lines for part in wrapped(line))

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def _summary(self) -> str:
        return "no residue found" if self.clean else f"{len(self.findings)} findings"


def audit(subject: Any, record: UnlearningRecord, *, evidence: Evidence | None = None) -> AuditReport:
    """Look for what is left of the tasks of a record.

    What can be found depends on what is known. A record by itself knows hashes: exact copies of the tasks' own tensors
    and of the tensors that were changed. With a fingerprint (``unlearn(…, fingerprint=take_fingerprint)``): such copies
    in any type and shape, masks, and tensors of at least 512 entries that hold half of an update or more. With the
    evidence at hand: updates in tensors of 16 entries or more, and samples. Data sets are judged by the task labels of
    what they give out (what they draw from is the user's), tensors in files also by their names. What mixes an update
    with other things beyond recognition (an importance, a later task's update) is found by no audit: that it is dropped
    is the purge's part.

    An unrelated tensor is taken for one that holds an update with a probability of at most 1e-9 per comparison, however
    few its entries: for all that is looked through together, at most 1e-9 times the pairs of a tensor and an update of
    its size. Of fewer than 13 entries that an update moved, only copies are recognised.

    Args:
        subject: a strategy, whose model, optimizer, plugins, evaluator and everything that they hold are looked
            through; a model; or a folder or file.
        record: of the unlearning.
        evidence: what :func:`take_evidence` returned before it.

    Raises:
        FileNotFoundError: if ``subject`` is a path at which nothing is.
        TypeError: if ``subject`` is none of these, or ``record`` is no record.
    """
    if not isinstance(record, UnlearningRecord):
        raise TypeError(f"record must be an UnlearningRecord, got {record!r}: UnlearningRecord.load(file) reads one")
    if not (isinstance(subject, (str, PathLike, nn.Module)) or hasattr(subject, "plugins")):
        raise TypeError(f"subject must be a strategy, a model, or the path of a folder or file, got {subject!r}")
    recogniser = Recogniser(record, evidence)
    if isinstance(subject, (str, PathLike)):
        return _audit_files(Path(subject), record, recogniser)
    return _audit_objects(subject, record, recogniser, evidence)


def _audit_objects(
    strategy: Strategy, record: UnlearningRecord, recogniser: Recogniser, evidence: Evidence | None
) -> AuditReport:
    gone = set(record.tasks) - _learned_again(strategy)
    findings, looked_at = [], 0
    name = "model" if isinstance(strategy, nn.Module) else "strategy"
    for path, thing in reachable(strategy, name, [record, evidence], enter=lambda t: _tasks_of(t) is None):
        tensor, tasks = _as_tensor(thing), _tasks_of(thing)
        looked_at += tensor is not None or tasks is not None
        if tensor is not None:
            findings += [Finding(path, *match) for match in recogniser.matches(tensor)]
        elif tasks is not None:
            findings += [Finding(path, "data set", f"task {task}", 1.0) for task in sorted(tasks & gone)]
    return AuditReport(tuple(sorted(findings, key=lambda finding: finding.path)), looked_at)


def _learned_again(strategy: Strategy) -> set[int]:
    ledgers = [plugin.ledger for plugin in getattr(strategy, "plugins", ()) if hasattr(plugin, "ledger")]
    return {task for ledger in ledgers for task in ledger.remaining}


def _as_tensor(thing: object) -> Tensor | None:
    if isinstance(thing, Tensor):
        return thing
    if isinstance(thing, SparseValues):
        dense = torch.zeros(thing.shape, dtype=thing.values.dtype)
        dense[thing.where] = thing.values
        return dense
    if isinstance(thing, np.ndarray) and thing.dtype.kind in "fiub" and thing.dtype.itemsize <= 8 and thing.size:
        return torch.from_numpy(np.ascontiguousarray(thing))
    return None


def _tasks_of(thing: object) -> set[int] | None:
    labels = getattr(thing, "targets_task_labels", None)
    return None if labels is None else {int(task) for task in labels}


def _audit_files(root: Path, record: UnlearningRecord, recogniser: Recogniser) -> AuditReport:
    if not root.exists():
        raise FileNotFoundError(f"nothing is at {root}: give a folder or a file to look through")
    findings: list[Finding] = []
    unread: list[str] = []
    looked_at = 0
    for file in sorted(path for path in [root, *root.rglob("*")] if path.is_file()):
        if is_text(file):
            continue
        try:
            for inner, thing in contents(file):
                looked_at += 1
                path = f"{file}: {inner}".removesuffix(": ")
                findings += [Finding(path, "name", name, 1.0) for name in _named(inner, thing, record)]
                tensor = _as_tensor(thing)
                if tensor is not None:
                    findings += [Finding(path, *match) for match in recogniser.matches(tensor)]
                elif _shows(inner, thing, record.tasks):
                    findings.append(Finding(path, "log", "a picture or histogram of the task", 1.0))
        except UnreadableFileError as error:
            unread.append(str(error))
    return AuditReport(tuple(findings), looked_at, tuple(unread))


def _named(path: str, thing: object, record: UnlearningRecord) -> Iterator[str]:
    """Tensors that are called like one that was removed, or lie in a trajectory under the task's label."""
    if not isinstance(thing, Tensor):
        return
    plain = path.replace("['", ".").replace("']", "")
    yield from (name for name in record.plan.removed if plain == name or plain.endswith(f".{name}"))
    entry = re.fullmatch(r"(\d+)/(.+)/\w+", path)
    if entry and int(entry[1]) in record.tasks:
        yield f"task {entry[1]}'s update of {entry[2]}"


def _shows(path: str, value: object, tasks: Collection[int]) -> bool:
    return isinstance(value, dict) and "_type" in value and any(f"/Task{task:03d}" in path for task in tasks)


# In sentences for people who must answer for it -----------------------------------------------------------------------


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
