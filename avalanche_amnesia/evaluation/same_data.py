"""Comparison of the training data of two experiences, without going through all of it."""

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
    if tensor_hash(few_samples(ours)) != tensor_hash(few_samples(theirs)):
        return "the samples of its training data differ"
    return None


def few_samples(experience: Any) -> torch.Tensor:
    """Inputs of a few samples, evenly spread, as an evaluation sees them."""
    n = len(experience.dataset)
    with preserved_rng():
        seed_all(0)
        return task_data(experience, torch.linspace(0, n - 1, min(n, _SAMPLES)).long())[0]
