"""Data classes: plan (changes that an unlearning would make) and record (changes that an unlearning made)."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from avalanche_amnesia.audit.signing import SigningError, signature_of, verifier_of
from avalanche_amnesia.audit.words import plan_in_words, record_in_words
from avalanche_amnesia.checks import json_of
from avalanche_amnesia.saving.files import explain_errors, replace_file
from avalanche_amnesia.saving.typed import to_type

NOT_OBEYED = "obey=False: requests are only entered into the ledger"
"""Reason in the plans of a control strategy (``obey=False``), which unlearns nothing."""
Claim = Literal["exact", "conditional", "approximate"]


class RecordError(ValueError):
    """Error for a file or text that is no unlearning record."""


class ProofError(ValueError):
    """Error for a failed proof: the model and one retrained without the unlearned data differ in their bits.

    Attributes:
        record: the record, ``approximate`` by now; its last reason names the first task and tensor that differ.
        tasks: the first task that differs; if only tensors of no task differ, all tasks of the proof.
    """

    def __init__(self, message: str, record: UnlearningRecord, tasks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.record, self.tasks = record, tasks


@dataclass(frozen=True)
class SharedEntries:
    """Number of a tensor's entries that keep the updates of unlearned tasks, because remaining tasks use the entries.

    Attributes:
        entries: number of these entries, each counted once.
        tasks: the remaining tasks that read some of these entries, in training order.
    """

    entries: int
    tasks: tuple[int, ...]


@dataclass(frozen=True)
class UnlearningPlan:
    """Plan of an unlearning: the changes that it would make. Computing a plan changes nothing.

    Attributes:
        tasks: the tasks to unlearn.
        event: when the unlearning was requested, e.g. ``"after task 3"``.
        entries: shared tensor → number of entries that change.
        removed: tensors of the tasks to delete (heads, masks, embeddings).
        affected: remaining tasks that use entries which change, in training order.
        compensated: affected tasks whose loss a prepared replacement compensates.
        repaired: affected tasks to be trained on their kept samples.
        shared: shared tensor → its entries that keep the updates of the unlearned tasks, because remaining tasks read
            these entries (WSN); empty if the updates are removed.
        claim: the claim about the state after the unlearning: ``exact``, ``conditional`` or ``approximate``.
        trajectory_bytes: bytes of trajectory to free.
        purges: host plugins that would be cleaned, by class name.
        unpurged: plugins that hold learned state and have no purger, by class name.
        shared_state: buffers and attributes of modules that the trainings of all tasks changed. Their values stay
            (stock strategies; in masked models each task has its own buffers).
        reasons: why the claim is ``approximate``, in words; else empty.
        rests_on: parts outside of torch, torchvision, Avalanche and this package that took part in a training; the
            claim is ``conditional`` then: exact if they depend on nothing but their inputs and the seeded random
            streams.
        task: the remaining task to retrain without some samples; then ``tasks`` is empty. None: no such task.
        samples: salted hashes of the positions of these samples.
        classes: labels that lose all of their samples.
    """

    tasks: tuple[int, ...]
    event: str
    entries: Mapping[str, int]
    removed: tuple[str, ...]
    affected: tuple[int, ...]
    compensated: tuple[int, ...]
    shared: Mapping[str, SharedEntries]
    claim: Claim
    trajectory_bytes: int
    purges: tuple[str, ...]
    unpurged: tuple[str, ...]
    repaired: tuple[int, ...] = ()
    shared_state: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    rests_on: tuple[str, ...] = ()
    task: int | None = None
    samples: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return plan_in_words(self)


@dataclass(frozen=True)
class TensorChange:
    """A changed, new or removed tensor of the model, with its hash before and after an unlearning.

    Attributes:
        name: in the model's ``state_dict``.
        before: :func:`~avalanche_amnesia.bits.tensor_hash` of its bits before, ``blake3:…``; None if it did not
            exist.
        after: hash of its bits after the unlearning; None if the tensor was removed.
    """

    name: str
    before: str | None
    after: str | None


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on, by name."""
    found = {"python": platform.python_version()}
    for package in ("avalanche-amnesia", "avalanche-lib", "torch", "numpy"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@dataclass(frozen=True)
class Provenance:
    """Origin of a model: method, settings, seed, hashes of its data, and versions of packages.

    Attributes:
        method: the strategy's class.
        options: class name of the strategy, its optimizer and its plugins → their plain settings.
        seed: seed of the strategy; None if it has none.
        data: task → SHA-256 of the labels of its training data in order, for every task trained until then: the owner
            of the data can verify the labels. Inputs are not hashed.
        versions: package → version, for the packages that the result depends on.
    """

    method: str
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=package_versions)


@dataclass(frozen=True)
class RepairSummary:
    """Size of a repair (further training of tasks affected by an unlearning): samples, steps and changed entries.

    Attributes:
        samples: repaired task → number of its samples that the steps used, in training order.
        steps: number of steps of the repair's own optimizers.
        entries: parameter → number of entries that the repair moved.
    """

    samples: Mapping[int, int]
    steps: int
    entries: Mapping[str, int]


@dataclass(frozen=True)
class Proof:
    """Proof that an unlearning was exact: retraining without the data gave the same bits in all compared tensors.

    Attributes:
        tasks: the tasks that were compared, in training order.
        hashes: compared tensor → its hash.
        apart: True if no process of this training had trained the unlearned data. Otherwise the user's code may have
            stored some of the data, and a ``conditional`` record does not count as proved.
        seconds: wall-clock time of the training.
        time: when the tensors were compared, UTC, ISO 8601.
        versions: package → version.
    """

    tasks: tuple[int, ...]
    hashes: Mapping[str, str]
    apart: bool
    seconds: float
    time: str
    versions: Mapping[str, str] = field(default_factory=package_versions)


@dataclass(frozen=True)
class UnlearningRecord:
    """Record of an unlearning: its plan, tensor hashes before and after, and plugins whose task data was deleted.

    Attributes:
        plan: the applied plan.
        changes: every changed, new or removed model tensor, with hashes before and after.
        unchanged: every other model tensor → its hash.
        purged: one line per cleaned host plugin or optimizer.
        remaining: remaining tasks afterwards, in training order.
        n_trained: trainings finished before the unlearning.
        iteration: training iterations finished before the unlearning.
        seconds: wall-clock time of the unlearning, without callbacks of plugins, metrics and loggers.
        time: when the unlearning happened, UTC, ISO 8601.
        provenance: origin of the model.
        repair: summary of the repair; None without a repair.
        proof: added later by ``strategy.prove``. A signature covers the record as it was signed: sign it again to
            include its proof.
    """

    plan: UnlearningPlan
    changes: tuple[TensorChange, ...]
    purged: tuple[str, ...]
    remaining: tuple[int, ...]
    n_trained: int
    iteration: int
    seconds: float
    unchanged: Mapping[str, str] = field(default_factory=dict)
    time: str = ""
    provenance: Provenance = field(default_factory=lambda: Provenance("unknown"))
    repair: RepairSummary | None = None
    proof: Proof | None = None

    def __str__(self) -> str:
        return record_in_words(self)

    @property
    def tasks(self) -> tuple[int, ...]:
        """Return the labels of the tasks that this unlearning removed."""
        return self.plan.tasks

    @property
    def task(self) -> int | None:
        """Return the task retrained without some of its samples; None if whole tasks were unlearned."""
        return self.plan.task

    @property
    def affected(self) -> tuple[int, ...]:
        """Return the tasks, not unlearned, that use parameter entries changed by the unlearning."""
        return self.plan.affected

    @property
    def proved(self) -> bool:
        """Return True if a proof shows that retraining all remaining tasks gives bit-identical tensors."""
        proof = self.proof
        if proof is None or not set(self.remaining) <= set(proof.tasks):
            return False
        return self.plan.claim == "exact" or (self.plan.claim == "conditional" and proof.apart)

    @property
    def claim(self) -> Claim:
        """Return ``exact`` if the model equals a retrained one, bit for bit; else ``conditional`` or ``approximate``.
        ``conditional``: exact if the external code named in :attr:`rests_on` is deterministic (given the seed)."""
        return "exact" if self.proved else self.plan.claim

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons, in words, why the unlearning is only ``approximate``; else empty."""
        return self.plan.reasons

    @property
    def rests_on(self) -> tuple[str, ...]:
        """Return the external code that must be deterministic for a ``conditional`` claim; empty for other claims."""
        return () if self.proved else self.plan.rests_on

    @property
    def after(self) -> dict[str, str]:
        """Return a dict of tensor name to hash, for all tensors of the model right after the unlearning."""
        changed = {change.name: change.after for change in self.changes if change.after is not None}
        return dict(sorted({**self.unchanged, **changed}.items()))

    # As JSON --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the record to a JSON file, completely or not at all; on failure an OSError names the remedy."""
        with explain_errors(Path(path)):
            replace_file(Path(path), (self.to_json() + "\n").encode())

    @classmethod
    def from_json(cls, text: str) -> UnlearningRecord:
        """Return the record from the JSON of :meth:`to_json` or :meth:`sign`; a signature is not verified.

        Raises:
            RecordError: if the text is no record.
        """
        try:
            data = json_of(text)
            if isinstance(data, dict) and {"record", "signature"} <= data.keys():
                data = data["record"]
            record: UnlearningRecord = to_type(cls, data, cls.__name__)
            return record
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError(
                f"this is no unlearning record ({type(error).__name__}: {error}); give what UnlearningRecord.save wrote"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> UnlearningRecord:
        """Return the record in a file that :meth:`save` wrote.

        Raises:
            RecordError: if the file contains no record.
        """
        return cls.from_json(Path(path).read_text(errors="replace"))

    def sign(self, private_key: Any) -> str:
        """Return the record with a signature, as JSON; see :func:`~avalanche_amnesia.audit.verify`.

        Args:
            private_key: an ``Ed25519PrivateKey`` of the package ``cryptography``, its 32 raw bytes, or its PEM file
                as bytes, unencrypted.

        Raises:
            SigningError: if it is none of these, or ``cryptography`` is not installed (extra ``sign``).
        """
        record = asdict(self)
        return json.dumps({"record": record, **signature_of(record, private_key)}, indent=2) + "\n"


def verify(document: str, public_key: Any) -> UnlearningRecord:
    """Return the record in a signed document; raise SigningError unless ``public_key`` verifies its signature.

    Args:
        document: what :meth:`UnlearningRecord.sign` returned.
        public_key: the signer's key, from a source that you trust: an ``Ed25519PublicKey``, its 32 raw bytes, or PEM.
            The key inside the document proves nothing.

    Raises:
        SigningError: if the document is not signed, or was changed, or was signed with another key.
    """
    check = verifier_of(public_key)
    try:
        data = json_of(document)
        record = dict(data["record"])
    except (ValueError, TypeError, KeyError) as error:
        raise SigningError(
            f"this is no signed record ({type(error).__name__}: {error}); give what UnlearningRecord.sign returned"
        ) from error
    check(record, data)
    return UnlearningRecord.from_json(json.dumps(record))
