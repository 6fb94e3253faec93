"""Split and permuted streams from any set of images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import BatchTransform, Chain
from avalanche_amnesia.benchmarks.tasks import task_benchmark
from avalanche_amnesia.seeding import derive_seed


@dataclass(frozen=True, eq=False)
class PermutePixels:
    """Transform that reorders the flattened pixels: output pixel ``i`` is input pixel ``order[i]``."""

    order: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1).index_select(1, self.order).reshape(x.shape)


@dataclass(frozen=True)
class Images:
    """Labelled train and test images, with the transforms to apply ``before`` and ``after`` a task's own transform."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    before: tuple[BatchTransform, ...] = ()
    after: tuple[BatchTransform, ...] = ()

    @property
    def classes(self) -> list[int]:
        """Return the classes, ascending."""
        return self.train[1].unique().tolist()

    def subset(self, n_train: int | None, n_test: int | None, seed: int) -> "Images":
        """Return stratified subsets of ``n_train`` and ``n_test`` images (None: all), drawn by ``seed``."""
        return replace(
            self,
            train=_draw_subset(self.train, n_train, seed, "n_train"),
            test=_draw_subset(self.test, n_test, seed, "n_test"),
        )

    def wrap_transform(self, change: BatchTransform | None) -> BatchTransform | None:
        """Chain ``before``, a task's own transform ``change``, and ``after``; return None if there is no transform."""
        steps = self.before + (() if change is None else (change,)) + self.after
        return Chain(steps) if steps else None


def split(images: Images, n_tasks: int, class_order: Sequence[int] | None) -> CLScenario:
    """Return a benchmark with the classes in equal parts, one part per task."""
    classes = images.classes
    allowed = [parts for parts in range(1, len(classes) + 1) if len(classes) % parts == 0]
    if checks.integer(n_tasks) not in allowed:
        fit = ", ".join(map(str, allowed))
        raise ValueError(f"n_tasks={n_tasks!r} does not divide {len(classes)} classes equally; allowed are {fit}")
    order = classes if class_order is None else list(class_order)
    if sorted(order) != classes:
        raise ValueError(f"class_order={order} must hold each of the classes {classes} once")
    size = len(classes) // n_tasks
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return task_benchmark(images.train, images.test, parts, transforms=[images.wrap_transform(None)] * n_tasks)


def permuted(images: Images, n_tasks: int, seed: int) -> CLScenario:
    """Return a benchmark with all classes in every task; each task except the first has its own order of pixels."""
    n_tasks = checks.whole_number("n_tasks", n_tasks)
    n_pixels = images.train[0][0].numel()
    changes: list[BatchTransform | None] = [None]
    for task in range(1, n_tasks):
        generator = torch.Generator().manual_seed(derive_seed(seed, "permutation", task))
        changes.append(PermutePixels(torch.randperm(n_pixels, generator=generator)))
    return all_classes(images, changes)


def all_classes(images: Images, changes: Sequence[BatchTransform | None]) -> CLScenario:
    """Return a benchmark with all classes in every task, and one transform (or None) per task."""
    transforms = [images.wrap_transform(change) for change in changes]
    return task_benchmark(images.train, images.test, [images.classes] * len(changes), transforms=transforms)


def _draw_subset(data: tuple[Tensor, Tensor], n: int | None, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    if n is None:
        return data
    index = stratified_positions(data[1], n, seed, purpose)
    return data[0][index], data[1][index]


# Draws of samples ---------------------------------------------------------------------------------------------------


def stratified_positions(labels: Tensor, n: int, seed: int, purpose: str) -> Tensor:
    """Return positions of ``n`` samples drawn by ``seed``; each class keeps its share, to within one sample."""
    classes, counts = labels.unique(return_counts=True)
    total = len(labels)
    number = checks.integer(n)
    if number is None or not len(classes) <= number <= total:
        raise ValueError(f"{purpose}: {n!r} samples asked for; give {len(classes)} (one per class) to {total} (all)")
    quotas = dict(zip(classes.tolist(), _class_quotas(counts.tolist(), number), strict=True))
    return draw_positions(labels, quotas, seed, "subset", purpose)


def draw_positions(labels: Tensor, quotas: Mapping[int, int], seed: int, *purpose: int | str) -> Tensor:
    """Draw samples of each class and return their positions: ``quotas[class]`` samples, or all if there are fewer."""
    chosen = []
    for label, count in quotas.items():
        where = (labels == label).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(derive_seed(seed, *purpose, label))
        chosen.append(where[torch.randperm(len(where), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


def _class_quotas(counts: list[int], n: int) -> list[int]:
    """Divide ``n`` among classes in proportion to ``counts``. Integer arithmetic: equal results on all machines."""
    total = sum(counts)
    quotas = [count * n // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda i: -(counts[i] * n % total))
    for i in by_remainder[: n - sum(quotas)]:
        quotas[i] += 1
    return quotas
