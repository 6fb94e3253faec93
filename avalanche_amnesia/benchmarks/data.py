"""The data of one task as a torch data set: a view of shared tensors, or of a lazy data set."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BatchTransform = Callable[[Tensor], Tensor]
"""A function of whole batches: float32 ``(n, …)`` in, or int64 for tokens, the same shape out; no draws."""


@dataclass(frozen=True)
class Chain:
    """Several transforms, first to last."""

    steps: tuple[BatchTransform, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class TensorTask(Dataset[tuple[Tensor, int]]):
    """One task's samples inside a base tensor that many share; pickled or copied it takes no others' along."""

    def __init__(
        self, base: Tensor, index: Tensor, targets: Sequence[int], transform: BatchTransform | None = None
    ) -> None:
        self.base = base
        self.index = index
        self.targets = list(targets)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        return self._prepared(self.base[self.index[item]].unsqueeze(0))[0], self.targets[item]

    def tensors(self, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The task's samples, made at each call: x float32 or int64 (n, ...), y int64 (n,)."""
        index, targets = self.index, torch.tensor(self.targets, dtype=torch.int64)
        if where is not None:
            index, targets = index[where], targets[where]
        return self._prepared(self.base[index]), targets

    def part(self, where: Sequence[int]) -> "TensorTask":
        """Some of the task's samples, as a view."""
        index = self.index[torch.tensor(list(where), dtype=torch.int64)]
        return TensorTask(self.base, index, [self.targets[i] for i in where], self.transform)

    def alone(self, where: Sequence[int]) -> "TensorTask":
        """Some of the task's samples, with a base that holds no others."""
        rows = self.base[self.index[torch.tensor(list(where), dtype=torch.int64)]]
        return TensorTask(rows, torch.arange(len(rows)), [self.targets[i] for i in where], self.transform)

    def __getstate__(self) -> dict[str, Any]:
        if len(self.index) == len(self.base):  # a base of only these samples, which other tasks may share
            return self.__dict__
        return vars(self.alone(range(len(self))))

    def not_finite(self) -> Tensor:
        """Positions of the samples that hold NaN or infinity before the transform, int64 (n,)."""
        if not self.base.is_floating_point():
            return torch.zeros(0, dtype=torch.int64)
        rows = self.base if self.base.dim() > 1 else self.base[:, None]
        # A copy of each part at a time: tasks may be large. A sum takes a fifth of the time of a look at each number.
        sums = [rows.index_select(0, part).flatten(1).sum(1) for part in self.index.split(1024)]
        suspects = (~torch.cat(sums).isfinite()).nonzero()[:, 0]  # sums of large numbers overflow
        parts = self.index[suspects].split(1024)
        return suspects[~torch.cat([rows[part].flatten(1).isfinite().all(1) for part in parts])]

    def _prepared(self, x: Tensor) -> Tensor:
        if x.dtype != torch.int64:  # whole numbers are indices (tokens, columns of a table), which a float is not
            x = x.float()
        return x if self.transform is None else self.transform(x)


class LazyTask(Dataset[tuple[Any, int]]):
    """One task's samples inside a data set that makes its items on demand."""

    def __init__(self, base: Dataset[Any], index: Sequence[int], targets: Sequence[int]) -> None:
        self.base = base
        self.index = list(index)
        self.targets = list(targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, item: int) -> tuple[Any, int]:
        return self.base[self.index[item]][0], self.targets[item]

    def part(self, where: Sequence[int]) -> "LazyTask":
        """Some of the task's samples, as a view."""
        return LazyTask(self.base, [self.index[i] for i in where], [self.targets[i] for i in where])


def task_data(experience: Any, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and labels of an experience, as its evaluation sees them, without touching a global random stream."""
    found: tuple[Tensor, Tensor] | None = getattr(experience, "tensors_at", lambda index: None)(index)
    if found is not None:
        return found
    data = experience.dataset.eval()
    if index is not None:
        data = data.subset(index.tolist())
    # A loader draws a seed for its workers even where it has none; a generator of its own takes that draw.
    loader = DataLoader(data, batch_size=256, generator=torch.Generator())
    batches = [(batch[0], batch[1]) for batch in loader]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def targets_of(experience: Any) -> Tensor:
    """Labels of an experience's samples, in order, int64 ``(n,)``; no sample is made for them."""
    held = getattr(experience, "targets", None)  # the host's own sequence looks each label up by itself
    labels = experience.dataset.targets if held is None else held
    return torch.tensor([int(label) for label in labels], dtype=torch.int64)


def labels_fingerprint(experience: Any) -> str:
    """SHA-256 of an experience's labels, in order, and of how many there are; inputs may be many and are not hashed."""
    labels = targets_of(experience)
    digest = hashlib.sha256(f"{len(labels)}:".encode())
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def label_of_several(task: int, n: int) -> str:
    """Refusal of one of several experiences with one task label, and the way out."""
    return (
        f"training of task {task}: it is already trained and still remains, and {n} experiences of this stream have "
        "that task label, as in a class- or domain-incremental stream. Here every experience is a task of its own: "
        "give each its label, with SplitMNIST(..., return_task_id=True) and the like, nc_benchmark(..., "
        "task_labels=True), or task_incremental_benchmark(benchmark, reset_task_labels=True); or unlearn the task first"
    )


def why_trained(experience: Any) -> str:
    """Refusal of an experience whose task label is that of a task which remains, and the way out."""
    task = int(experience.task_labels[0])
    stream = getattr(experience, "origin_stream", None) or [experience]
    n = sum(list(other.task_labels) == [task] for other in stream)
    if n > 1:
        return label_of_several(task, n)
    return f"task {task} is already trained and remains: unlearn it first, or give the new data a task label of its own"
