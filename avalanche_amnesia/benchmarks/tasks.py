"""Task-incremental benchmarks from tensors or data sets, for multi-head models and Avalanche's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from avalanche.benchmarks import CLScenario, DatasetExperience, EagerCLStream
from avalanche.benchmarks.utils import (
    ConstantSequence,
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
    TaskLabels,
)
from torch import Tensor
from torch.utils.data import Dataset

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import BatchTransform, LazyTask, TensorTask, split_item

Data = tuple[Tensor, Tensor] | Dataset[Any]


class TaskExperience(DatasetExperience):
    """Experience of one task: its data, its task label, and the previous, current and future classes as lists.

    Args:
        samples: the task's samples with labels 0..k-1.
        task: the task label.
        n_classes: k of every task of the stream, in order.
        original_classes: the classes of the user's data, in the order of the labels 0..k-1.
        place: the position in the stream; by default the task label.
    """

    def __init__(
        self,
        samples: TensorTask | LazyTask,
        task: int,
        n_classes: Sequence[int],
        original_classes: Sequence[int],
        place: int | None = None,
    ) -> None:
        place = task if place is None else place
        super().__init__(dataset=None, current_experience=place)
        self.task_label = task
        self.task_labels = [task]
        self.original_classes = list(original_classes)
        # The multi-head classifier indexes a tensor with these, which sets don't allow.
        self.classes_in_this_experience = list(range(n_classes[place]))
        self.previous_classes = list(range(max(n_classes[:place], default=0)))
        self.classes_seen_so_far = list(range(max(n_classes[: place + 1])))
        self.future_classes = list(range(max(n_classes[place + 1 :], default=0)))
        self.replace_samples(samples)

    @property
    def benchmark(self) -> CLScenario:
        """Return the benchmark of the stream that contains this experience."""
        return self.origin_stream.benchmark

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Return (x, y) of all samples, computed at each call: x float32 or int64 (n, ...), y int64 (n,).

        None for a lazy data set, and if the experience's data set was replaced after it was built.
        """
        return self.tensors_at(None)

    def tensors_at(self, where: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return (x, y) of the samples at positions ``where`` (None: all), or None if x is not held as a tensor."""
        return self.samples.tensors(where) if isinstance(self.samples, TensorTask) else None

    @property
    def targets(self) -> list[int] | None:
        """Return each sample's label, 0..k-1; None if the experience's data set was replaced after it was built."""
        return None if self.samples is None else self.samples.targets

    def replace_samples(self, samples: TensorTask | LazyTask) -> None:
        """Replace the experience's samples and data set."""
        self._samples = samples
        # Avalanche reads the task label from the last attribute of a mini-batch.
        labels = TaskLabels(ConstantSequence(self.task_label, len(samples)))
        self._dataset = self._built_with = TaskAwareSupervisedClassificationDataset(
            [samples],
            data_attributes=[DataAttribute(samples.targets, "targets"), labels],
            collate_fn=samples.collate if isinstance(samples, LazyTask) else None,
        )

    @property
    def samples(self) -> TensorTask | LazyTask | None:
        """Return the samples; None if the experience's data set was replaced after it was built."""
        return self._samples if self._dataset is self._built_with else None


def task_benchmark(
    train: Data,
    test: Data,
    task_classes: Sequence[Sequence[int]],
    *,
    transforms: Sequence[BatchTransform | None] | None = None,
    first_task: int = 0,
) -> CLScenario:
    """Return a benchmark with one task per list of classes; the labels are 0..k-1 inside each task.

    Args:
        train: ``(x, y)`` with x uint8, floating, or of other integers, of shape (N, ...) and y integer of shape (N,),
            or a torch data set of (x, y) items, or of mappings ``{"pixel": x, "label": y}``, read item by item when
            needed (without ``targets`` also once now); inputs of several names reach the network as arguments of these
            names. A data set's own ``collate_fn`` gets its items, with the task's labels. uint8 reaches the model as
            float32 in 0..255, or as the transform returns it; other integers (tokens, categories) as int64.
        test: data of the test stream, in a format of ``train``.
        task_classes: the classes of each task; label i of a task is the i-th class of its list. Tasks may
            overlap and differ in size.
        transforms: for tensor pairs only, one deterministic batch transform (or None) per task; it gets float32, or
            int64 where x has integers.
        first_task: task label of the first task, at least 0, for data that arrive after other tasks were trained; the
            next tasks have the next labels.

    Returns:
        A scenario with a ``train_stream`` and a ``test_stream`` of :class:`TaskExperience`.

    Raises:
        ValueError: no task, a task without classes or with a repeated class, a class without samples, labels
            or classes that aren't integers, labels not one per sample, x of another type, transforms that
            don't fit.
    """
    classes = _checked_classes(task_classes)
    first_task = checks.whole_number("first_task", first_task, 0)
    steps: Sequence[BatchTransform | None] = [None] * len(classes) if transforms is None else transforms
    listed = isinstance(steps, Sequence) and all(step is None or callable(step) for step in steps)
    if not listed or len(steps) != len(classes):
        raise ValueError(f"transforms={steps!r}: give {len(classes)} functions of whole batches, or None for a task")
    streams = []
    for name, data in (("train", train), ("test", test)):
        if not isinstance(data, tuple) and any(step is not None for step in steps):
            raise ValueError(f"{name}: transforms apply to tensor pairs; give (x, y), or transform in the data set")
        streams.append(EagerCLStream(name, _make_experiences(name, data, classes, steps, first_task)))
    return scenario_of(streams, [len(chosen) for chosen in classes])


def scenario_of(streams: Sequence[EagerCLStream], n_classes: Sequence[int]) -> CLScenario:
    """Return a scenario with ``streams`` of TaskExperience, and with attributes for the numbers of classes."""
    benchmark = CLScenario(list(streams))
    benchmark.n_classes = max(n_classes)
    benchmark.n_classes_per_exp = list(n_classes)
    for stream in streams:
        stream.benchmark = benchmark
    return benchmark


def _checked_classes(task_classes: Sequence[Sequence[int]]) -> list[list[int]]:
    if not isinstance(task_classes, Iterable):
        raise ValueError(f"task_classes must be a list of classes per task, as [[0, 1], [2, 3]], got {task_classes!r}")
    classes = [list(checks.integers(f"task {task}", chosen, "classes")) for task, chosen in enumerate(task_classes)]
    if not classes:
        raise ValueError("task_classes is empty; give one list of classes per task, e.g. [[0, 1], [2, 3]]")
    for task, chosen in enumerate(classes):
        if not chosen:
            raise ValueError(f"task {task} has no classes; give at least one class per task")
        if repeated := sorted({c for c in chosen if chosen.count(c) > 1}):
            raise ValueError(f"task {task} repeats the classes {repeated}; name each class of a task once")
    return classes


def _make_experiences(
    name: str, data: Data, classes: list[list[int]], transforms: Sequence[BatchTransform | None], first_task: int
) -> list[TaskExperience]:
    base = _as_base(data, name)
    labels = _labels_of(data, name)
    sizes = [len(chosen) for chosen in classes]
    existing = set(labels.unique().tolist())
    experiences = []
    for position, chosen in enumerate(classes):
        if missing := [c for c in chosen if c not in existing]:
            raise ValueError(
                f"task {first_task + position}: no sample of the classes {missing} in the {name} data, which has the "
                f"classes {sorted(existing)}; change task_classes or add samples"
            )
        label_of = {c: label for label, c in enumerate(chosen)}
        index = torch.isin(labels, torch.tensor(chosen)).nonzero()[:, 0]
        targets = [label_of[c] for c in labels[index].tolist()]
        samples: TensorTask | LazyTask
        if isinstance(base, Tensor):
            samples = TensorTask(base, index, targets, transforms[position])
        else:
            samples = LazyTask(base, index.tolist(), targets)
        experiences.append(TaskExperience(samples, first_task + position, sizes, chosen, position))
    return experiences


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _as_base(data: Data, name: str) -> Tensor | Dataset[Any]:
    if isinstance(data, tuple):
        if len(data) != 2:
            raise ValueError(f"{name}: a tuple of {len(data)} parts; give (x, y)")
        try:
            x = torch.as_tensor(data[0])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}: x is no array of numbers ({error}); give a tensor of shape (n, …)") from None
        if x.dim() == 0 or x.layout is not torch.strided:
            given = f"a tensor of layout {x.layout}" if x.dim() else "one number"
            raise ValueError(f"{name}: x is {given}; give a dense tensor of shape (n, …)")
        x = x.detach()
        if x.dtype == torch.uint8:
            return x
        if x.is_floating_point():
            return x.float()
        if x.dtype in _INTEGERS:
            return x.to(torch.int64)
        raise ValueError(f"{name}: x has dtype {x.dtype}; give floats, bytes (images) or integers (tokens)")
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, (Mapping, str)):
        raise ValueError(f"{name}: {type(data).__name__} is no (x, y) of tensors, and has no __getitem__ and __len__")
    return data


# Labels of tensor pairs and data sets --------------------------------------------------------------------------------


def _labels_of(data: Data, name: str) -> Tensor:
    """Return the labels of a tensor pair or data set, in the order of its samples, int64 ``(n,)``."""
    if isinstance(data, tuple):
        length = len(data[0])
        labels = _as_int64(data[1], name)
    else:
        length = len(cast(Sized, data))
        targets = getattr(data, "targets", None)
        if targets is None:
            # Items may have random transforms, and building a benchmark must not change the user's random state.
            with torch.random.fork_rng(devices=[]):
                targets = [split_item(data[item])[1] for item in range(length)]
        labels = _as_int64(targets, name)
        if getattr(data, "targets", None) is not None and getattr(data, "target_transform", None) is not None:
            _check_labels(data, labels, name)
    if len(labels) != length:
        raise ValueError(f"{name}: {length} samples but {len(labels)} labels; give one label per sample")
    return labels


def _check_labels(data: Any, labels: Tensor, name: str) -> None:
    """Raise ValueError if the labels of a few items differ from ``labels``, the targets of their data set."""
    for item in sorted({0, len(labels) // 2, len(labels) - 1} if len(labels) == len(data) and len(data) else ()):
        try:
            with torch.random.fork_rng(devices=[]):
                label = split_item(data[item])[1]
        except Exception:  # an item that can't be made raises an error later, when it is needed
            return
        if checks.integer(label) != int(labels[item]):
            raise ValueError(
                f"{name}: item {item} has the label {label!r}, and targets[{item}] is {int(labels[item])}, which no "
                "target_transform changes: give a data set whose items have the labels in targets, or no targets"
            )


def _as_int64(y: Iterable[Any], name: str) -> Tensor:
    if hasattr(y, "dtype") and getattr(y.dtype, "kind", "i") not in "OSU":  # numbers of numpy or torch
        labels = torch.as_tensor(y)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.ndim != 1:
            raise ValueError(f"{name}: give y.long() of shape (n,), not {labels.dtype} of {tuple(labels.shape)}")
        return labels.to(torch.int64)
    if not isinstance(y, Iterable):
        raise ValueError(f"{name}: {y!r} are no labels; give integer class labels of shape (n,)")
    numbers = [(label, checks.integer(label)) for label in y]
    if wrong := [label for label, number in numbers if number is None]:
        raise ValueError(f"{name}: {wrong[0]!r} is no class label: give ints, such as places in sorted(set(labels))")
    return torch.tensor([number for _, number in numbers], dtype=torch.int64)
