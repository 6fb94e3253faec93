"""Split, permuted and rotated streams over any set of images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import BatchTransform
from avalanche_amnesia.benchmarks.subsets import stratified
from avalanche_amnesia.benchmarks.tasks import task_benchmark
from avalanche_amnesia.benchmarks.transforms import Chain, PermutePixels, Rotate
from avalanche_amnesia.seeding import derive_seed


@dataclass(frozen=True)
class Images:
    """A labelled set of images, with its usual preparation around a task's own change."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    before: tuple[BatchTransform, ...] = ()
    after: tuple[BatchTransform, ...] = ()

    @property
    def classes(self) -> list[int]:
        """The classes, ascending."""
        return self.train[1].unique().tolist()

    def subset(self, n_train: int | None, n_test: int | None, seed: int) -> "Images":
        """Fewer images, stratified by class and drawn by seed; None keeps all."""
        return replace(
            self,
            train=_kept(self.train, n_train, seed, "n_train"),
            test=_kept(self.test, n_test, seed, "n_test"),
        )

    def around(self, change: BatchTransform | None) -> BatchTransform | None:
        """The whole preparation of a task with its own change in the middle."""
        steps = self.before + (() if change is None else (change,)) + self.after
        return Chain(steps) if steps else None


def split(images: Images, n_tasks: int, class_order: Sequence[int] | None) -> CLScenario:
    """The classes in equal parts, one part per task."""
    classes = images.classes
    allowed = [parts for parts in range(1, len(classes) + 1) if len(classes) % parts == 0]
    if checks.integer(n_tasks) not in allowed:
        raise ValueError(
            f"n_tasks={n_tasks!r} does not split {len(classes)} classes into equal parts; "
            f"allowed are {', '.join(map(str, allowed))}"
        )
    order = classes if class_order is None else list(class_order)
    if sorted(order) != classes:
        raise ValueError(f"class_order={order} must hold each of the classes {classes} once")
    size = len(classes) // n_tasks
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return task_benchmark(images.train, images.test, parts, transforms=[images.around(None)] * n_tasks)


def permuted(images: Images, n_tasks: int, seed: int) -> CLScenario:
    """All classes in every task; the pixels of each task but the first in an order of its own."""
    n_tasks = checks.whole_number("n_tasks", n_tasks)
    n_pixels = images.train[0][0].numel()
    changes: list[BatchTransform | None] = [None]
    for task in range(1, n_tasks):
        generator = torch.Generator().manual_seed(derive_seed(seed, "permutation", task))
        changes.append(PermutePixels(torch.randperm(n_pixels, generator=generator)))
    return _all_classes(images, changes)


def rotated(images: Images, n_tasks: int, angles: Sequence[float] | None) -> CLScenario:
    """All classes in every task; the images of each task turned by an angle of its own."""
    n_tasks = checks.whole_number("n_tasks", n_tasks)
    turns = [90.0 * task / max(1, n_tasks - 1) for task in range(n_tasks)] if angles is None else list(angles)
    if len(turns) != n_tasks:
        raise ValueError(f"{len(turns)} angles for {n_tasks} tasks; give one angle in degrees per task")
    return _all_classes(images, [Rotate(float(turn)) if turn % 360 else None for turn in turns])


def _all_classes(images: Images, changes: Sequence[BatchTransform | None]) -> CLScenario:
    transforms = [images.around(change) for change in changes]
    return task_benchmark(images.train, images.test, [images.classes] * len(changes), transforms=transforms)


def _kept(data: tuple[Tensor, Tensor], n: int | None, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    if n is None:
        return data
    index = stratified(data[1], n, seed, purpose)
    return data[0][index], data[1][index]
