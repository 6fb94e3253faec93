"""Streams over scikit-learn's 1,797 handwritten digits of 8×8 pixels: real data, no download."""

from collections.abc import Sequence
from functools import cache

import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia.benchmarks.families import Images, permuted, split, stratified_positions

N_TEST = 360


def SplitDigits(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    class_order: Sequence[int] | None = None,
) -> CLScenario:
    """Return a benchmark with the ten digits in equal parts, one part per task; images float32 (1, 8, 8) in [0, 1].

    Args:
        n_tasks: 1, 2, 5 or 10.
        seed: draws the train/test split (1,437 and 360 images, stratified) and the subsets.
        n_train: number of images kept of the whole training set before the split into tasks, stratified, 10 to 1,437;
            None: all.
        n_test: number of images kept of the test set, stratified, 10 to 360; None: all.
        class_order: the ten digits in the order of the tasks; None: 0 to 9.

    Raises:
        ValueError: for an invalid value; the message names the allowed values.
    """
    return split(digits(seed).subset(n_train, n_test, seed), n_tasks, class_order)


def PermutedDigits(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
) -> CLScenario:
    """Return a benchmark with all ten digits in every task; each task after task 0 has its pixels in a new fixed order.

    Args:
        n_tasks: at least 1.
        seed: draws the train/test split, the subsets, and each task's order of pixels, which depends on the
            seed and the task only.
        n_train: images per task (the same ones in every task), stratified, 10 to 1,437; None: all.
        n_test: test images per task, stratified, 10 to 360; None: all.

    Raises:
        ValueError: for an invalid value; the message names the allowed values.
    """
    return permuted(digits(seed).subset(n_train, n_test, seed), n_tasks, seed)


@cache
def _all_digits() -> tuple[Tensor, Tensor]:
    """Return images and labels of all digits, cached because scikit-learn parses text; callers must copy both."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1).div(16)
    return x, torch.tensor(bunch.target, dtype=torch.int64)


def digits(seed: int) -> Images:
    """Return the digits with a stratified train/test split drawn by ``seed``."""
    x, y = _all_digits()
    in_test = torch.zeros(len(y), dtype=torch.bool)
    in_test[stratified_positions(y, N_TEST, seed, "test split")] = True
    return Images((x[~in_test], y[~in_test]), (x[in_test], y[in_test]))
