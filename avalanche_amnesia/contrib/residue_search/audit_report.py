"""Findings of an audit."""

from dataclasses import dataclass

from avalanche_amnesia.audit.words import as_html, wrapped


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
