"""One-way fingerprints (hashes, count sketches) of removed tensors, as a record keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["own tensor", "mask", "state before", "update", "sample"]


@dataclass(frozen=True)
class Trace:
    """The hash of something that was removed."""

    kind: Kind
    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Sketch:
    """Sums over random groups of entries with random signs, of a task's update and of the tensor without it."""

    size: int
    update: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Fingerprint:
    """Hashes and sketches of removed tensors, for a record; no tensor can be made from them.

    Attributes:
        seed: of the sketches.
        traces: hashes of what was removed.
        sketches: shared tensor → sketch of what was taken out of it.
        samples: hashes of the tasks' inputs; empty unless asked for.
        sample_size: entries of one input.
    """

    seed: int
    traces: tuple[Trace, ...]
    sketches: Mapping[str, Sketch] = field(default_factory=dict)
    samples: tuple[str, ...] = ()
    sample_size: int = 0
