"""Comparison of the training data of two experiences, without going through all of it."""

import hashlib
from typing import Any

import torch

from avalanche_amnesia.benchmarks.data import labels_fingerprint, task_data
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.seeding import preserved_rng, seed_all

_SAMPLES = 8
"""Number of samples that are compared: tasks that differ in their inputs (permuted, rotated) do so in nearly all."""


def difference_of_data(ours: Any, theirs: Any) -> str | None:
    """Difference between two experiences' training data, in words; None: nothing that was looked at.

    All labels are compared, and a few samples, evenly spread, as an evaluation sees them. Transforms that draw are
    given the same random streams; the caller's stay as they were.
    """
    if ours.dataset is theirs.dataset:
        return None
    n, other = len(ours.dataset), len(theirs.dataset)
    if n != other:
        return f"{other} training samples in the run, and {n} there"
    if labels_fingerprint(ours) != labels_fingerprint(theirs):
        return "the labels of its training data differ"
    chosen = torch.linspace(0, n - 1, min(n, _SAMPLES)).long()
    if tensor_hash(_samples(ours, chosen)) != tensor_hash(_samples(theirs, chosen)):
        return "the samples of its training data differ"
    return None


def data_fingerprint(experience: Any) -> str:
    """Hash of an experience's training data, its requests, and the tasks of its stream.

    Inputs count as an evaluation sees them: all of them where they lie in memory, else a few, evenly spread.
    """
    n = len(experience.dataset)
    found = getattr(experience, "tensors_at", lambda where: None)(None)
    inputs = _samples(experience, torch.linspace(0, n - 1, min(n, _SAMPLES)).long()) if found is None else found[0]
    stream = getattr(experience, "origin_stream", None) or [experience]
    facts = [
        labels_fingerprint(experience),
        tensor_hash(inputs, "sha256"),  # keys of run stores that exist
        repr(tuple(getattr(experience, "requests", ()))),
        repr(getattr(experience, "deadline", None)),
        repr([(int(e.task_label), bool(getattr(e, "permanent", False)), len(e.dataset)) for e in stream]),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _samples(experience: Any, chosen: torch.Tensor) -> torch.Tensor:
    with preserved_rng():
        seed_all(0)
        return task_data(experience, chosen)[0]
