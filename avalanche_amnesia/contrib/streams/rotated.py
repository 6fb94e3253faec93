"""Streams of rotated images; those of scikit-learn's digits."""

from collections.abc import Sequence
from dataclasses import dataclass

from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.digits import digits
from avalanche_amnesia.benchmarks.families import Images, all_classes


@dataclass(frozen=True)
class Rotate:
    """Rotate counter-clockwise about the centre, bilinear, with zeros from outside the image."""

    degrees: float

    def __call__(self, x: Tensor) -> Tensor:
        from torchvision.transforms.functional import InterpolationMode, rotate

        return rotate(x, self.degrees, interpolation=InterpolationMode.BILINEAR)


def rotated(images: Images, n_tasks: int, angles: Sequence[float] | None) -> CLScenario:
    """All classes in every task; the images of each task turned by an angle of its own."""
    n_tasks = checks.whole_number("n_tasks", n_tasks)
    turns = [90.0 * task / max(1, n_tasks - 1) for task in range(n_tasks)] if angles is None else list(angles)
    if len(turns) != n_tasks:
        raise ValueError(f"{len(turns)} angles for {n_tasks} tasks; give one angle in degrees per task")
    return all_classes(images, [Rotate(float(turn)) if turn % 360 else None for turn in turns])


def RotatedDigits(
    n_tasks: int = 5,
    *,
    angles: Sequence[float] | None = None,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
) -> CLScenario:
    """All ten digits in every task, turned by an angle of the task's own.

    Args:
        n_tasks: at least 1.
        angles: one per task, in degrees; None: evenly from 0 to 90.
        seed: draws the train/test split and the subsets.
        n_train: images per task (the same ones in every task), stratified, 10 to 1,437; None: all.
        n_test: the same of the test set, 10 to 360.

    Raises:
        ValueError: a value that is not allowed; the message names those that are.
    """
    return rotated(digits(seed).subset(n_train, n_test, seed), n_tasks, angles)
