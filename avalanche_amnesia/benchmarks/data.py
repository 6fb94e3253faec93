"""Data of one task as a torch data set (a view of shared tensors or of a lazy data set), and its task label."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from avalanche.benchmarks import OnlineCLExperience
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.seeding import preserved_rng, seed_all
from avalanche_amnesia.unit_graph.backbones import NamedTensors

BatchTransform = Callable[[Tensor], Tensor]
"""Deterministic function of batches of any size: float32 ``(n, …)``, or int64 for tokens, to the same shape."""
_AT_A_TIME = 256
"""Number of samples that are transformed together: so many fit in the caches of a CPU."""
_COMPARED = 8
"""Number of samples to compare: tasks with different inputs (permuted, rotated) differ in nearly all samples."""


@dataclass(frozen=True)
class Chain:
    """Transform that applies several transforms, first to last."""

    steps: tuple[BatchTransform, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class TensorTask(Dataset[tuple[Tensor, int]]):
    """Data set of a task: rows of a base tensor that many tasks share; a pickle or copy has only the task's samples."""

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
        return self._transform(self.base[self.index[item]].unsqueeze(0))[0], self.targets[item]

    def tensors(self, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x, y) at ``where`` (None: all samples): x float32 or int64 (n, ...), y int64 (n,). Not cached."""
        some = self if where is None else self.subset(where.tolist())
        x = torch.empty(0)
        for number, part in enumerate(some.index.split(_AT_A_TIME)):
            made = self._transform(self.base.index_select(0, part))
            x = x if number else made.new_empty(len(some), *made.shape[1:])  # half of the memory of a list of parts
            x[number * _AT_A_TIME :][: len(made)] = made
        return x, torch.tensor(some.targets, dtype=torch.int64)

    def subset(self, where: Sequence[int]) -> "TensorTask":
        """Return a view of the samples at positions ``where``."""
        index = self.index[torch.tensor(list(where), dtype=torch.int64)]
        return TensorTask(self.base, index, [self.targets[i] for i in where], self.transform)

    def copy_subset(self, where: Sequence[int]) -> "TensorTask":
        """Return the samples at positions ``where`` as a data set with its own base tensor."""
        rows = self.base[self.index[torch.tensor(list(where), dtype=torch.int64)]]
        return TensorTask(rows, torch.arange(len(rows)), [self.targets[i] for i in where], self.transform)

    def __getstate__(self) -> dict[str, Any]:
        if len(self.index) == len(self.base):  # a base of only these samples, which other tasks may share
            return self.__dict__
        return vars(self.copy_subset(range(len(self))))

    def nonfinite_positions(self) -> Tensor:
        """Return the positions of samples with NaN or infinity before the transform, int64 (n,)."""
        # A copy of each part at a time, because tasks may be large.
        finite = [_finite_rows(self.base.index_select(0, part)[:, None].flatten(1)) for part in self.index.split(1024)]
        return (~torch.cat(finite)).nonzero()[:, 0]

    def _transform(self, x: Tensor) -> Tensor:
        if x.dtype != torch.int64:  # whole numbers are indices (tokens, columns of a table), which a float is not
            x = x.float()
        made = x if self.transform is None else self.transform(x)
        if not isinstance(made, Tensor) or len(made) != len(x):
            given = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else repr(made)
            raise TaskError(f"a transform of whole batches made {given} of {len(x)} samples; one each is needed")
        return made


def _finite_rows(rows: Tensor) -> Tensor:
    """Return a bool tensor, True for rows ``(n, …)`` without NaN or infinity."""
    sums = rows.sum(1).isfinite()  # seven times as fast: NaN and infinity reach the sum; a finite row may overflow
    return sums if bool(sums.all()) else rows.isfinite().all(1)


class LazyTask(Dataset[tuple[Any, int]]):
    """Data set of one task: some items of a larger data set, which loads each item on demand."""

    def __init__(self, base: Dataset[Any], index: Sequence[int], targets: Sequence[int]) -> None:
        self.base = base
        self.index = list(index)
        self.targets = list(targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, item: int) -> tuple[Any, int]:
        given = self.base[self.index[item]]
        x, _ = split_item(given)
        if isinstance(given, Mapping) and hasattr(self.base, "collate_fn"):  # which takes its own items
            x = {**given, label_name(given): self.targets[item]}
        return x, self.targets[item]

    def collate(self, items: list[Any]) -> list[Any]:
        """Return items as a mini-batch [inputs, labels, …], with the values that Avalanche appends to each item."""
        own = getattr(self.base, "collate_fn", None)
        if own is None:
            return unpack_batch(default_collate(items))
        try:
            x, y = unpack_batch(own([x if isinstance(x, Mapping) else (x, y) for x, y, *_ in items]))[:2]
        except Exception as error:  # user code can raise anything
            raise TaskError(
                f"the data set's collate_fn failed ({type(error).__name__}: {error}): it gets a list of the data set's "
                "items, with the task's labels, and must return the inputs and the labels of all of them"
            ) from error
        return [x, torch.as_tensor(y), *default_collate([rest for _, _, *rest in items])]

    def subset(self, where: Sequence[int]) -> "LazyTask":
        """Return a view of the samples at positions ``where``."""
        return LazyTask(self.base, [self.index[i] for i in where], [self.targets[i] for i in where])


def task_data(experience: Any, index: Tensor | None = None, *, training: bool = False) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of an experience, transformed as for evaluation or, if ``training``, for training."""
    found: tuple[Tensor, Tensor] | None = getattr(experience, "tensors_at", lambda index: None)(index)
    if found is not None:
        return found
    data = experience.dataset.train() if training else experience.dataset.eval()
    if index is not None:
        data = data.subset(index.tolist())
    # A loader draws a seed for its workers even where it has none; a generator of its own takes that draw.
    loader = DataLoader(data, batch_size=256, generator=torch.Generator(), collate_fn=data.collate_fn)
    batches = [unpack_batch(batch) for batch in loader]
    x = tree_map(lambda *parts: torch.cat(parts), *(batch[0] for batch in batches))  # a tensor, or several by name
    return x, torch.cat([batch[1] for batch in batches])


# Items and mini-batches: pairs, or mappings with a label under a usual name ------------------------------------------

_TASK = "targets_task_labels"
_LABELS = ("label", "labels", "target", "targets", "y")


def split_item(item: Any) -> tuple[Any, Any]:
    """Split a data set's item, or a mini-batch, into input and label; raise TaskError for an unknown format."""
    if isinstance(item, Mapping):
        name = label_name(item)
        inputs = {key: value for key, value in item.items() if key not in (name, _TASK)}
        if name is not None and inputs:
            return next(iter(inputs.values())) if len(inputs) == 1 else inputs, item[name]
        given = f"a mapping of {list(item)}"
    elif isinstance(item, (tuple, list)) and len(item) > 1:
        return item[0], item[1]
    else:
        given = f"a {type(item).__name__}"
    raise TaskError(f"items must be pairs (x, y), or mappings with a label in {', '.join(_LABELS)}; got {given}")


def label_name(item: Mapping[str, Any]) -> str | None:
    """Return the key of the label in an item (a mapping), or None if it has no label."""
    return next((name for name in _LABELS if name in item), None)


def unpack_batch(batch: Any) -> list[Any]:
    """Return a mini-batch as a list: inputs (a mapping becomes ``NamedTensors``), labels and all further values."""
    if isinstance(batch, Mapping):
        batch = [*split_item(batch), *([batch[_TASK]] if _TASK in batch else [])]
    x, *rest = batch
    return [NamedTensors(x) if isinstance(x, Mapping) and not isinstance(x, NamedTensors) else x, *rest]


def targets_of(experience: Any) -> Tensor:
    """Return the labels of an experience's samples, in sample order, int64 ``(n,)``, without loading a sample."""
    held = getattr(experience, "targets", None)  # Avalanche's own sequence reads each label separately
    labels = experience.dataset.targets if held is None else held
    return torch.tensor([int(label) for label in labels], dtype=torch.int64)


def labels_fingerprint(experience: Any, before: str = "") -> str:
    """Return the SHA-256 of an experience's class labels; ``before``: the hash of its task's earlier experiences."""
    labels = targets_of(experience)
    digest = hashlib.sha256(f"{before}{len(labels)}:".encode())
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def attribute_of(experience: Any, name: str, default: Any) -> Any:
    """Return the attribute ``name`` of an experience, else of the experience it was split from, else ``default``."""
    origin: Any = vars(experience).get("origin_experience")  # hidden from trainings, in a wrapper
    return getattr(experience, name, getattr(getattr(origin, "value", origin), name, default))


def data_difference(ours: Any, theirs: Any) -> str | None:
    """Return the difference of two experiences' training data as text, or None if all compared values are equal.

    Compared are all labels, and a few evenly spread samples with evaluation transforms. Random transforms get the same
    random streams for both; the caller's random state does not change.
    """
    if ours.dataset is theirs.dataset:
        return None
    n, other = len(ours.dataset), len(theirs.dataset)
    if n != other:
        return f"{other} training samples in the run, and {n} there"
    if labels_fingerprint(ours) != labels_fingerprint(theirs):
        return "the labels of its training data differ"
    if [*map(tensor_hash, few_samples(ours))] != [*map(tensor_hash, few_samples(theirs))]:
        return "the samples of its training data differ"
    return None


def few_samples(experience: Any) -> list[Tensor]:
    """Return the input tensors of a few evenly spread samples of an experience, with evaluation transforms."""
    with preserved_rng():
        seed_all(0)
        return tree_leaves(some_task_data(experience, _COMPARED)[0])


def some_task_data(experience: Any, samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of at most ``samples`` evenly spread samples, with evaluation transforms."""
    n = len(experience.dataset)
    return task_data(experience, None if n <= samples else torch.linspace(0, n - 1, samples).long())


# Labels of tasks ------------------------------------------------------------------------------------------------------

HOW_TO_LABEL = (
    "Here every experience is a task of its own: give each its label, with task_incremental_benchmark(benchmark, "
    "reset_task_labels=True), SplitMNIST(..., return_task_id=True) and the like, or nc_benchmark(..., task_labels=True)"
)


class TaskError(ValueError):
    """Error if an experience can't be trained as one task; strategy and model stay unchanged."""


def single_task(experience: Any) -> int:
    """Return the one task label of an experience; raise TaskError if it has none, or several."""
    labels = labels_of(experience)
    if len(labels) != 1:
        raise TaskError(f"an experience must hold exactly one task, got task labels {labels}. {HOW_TO_LABEL}")
    return labels[0]


def labels_of(experience: Any) -> list[int]:
    """Return the task labels of an experience; raise TaskError if it has none."""
    labels = getattr(experience, "task_labels", ())
    if not len(labels):
        refuse_part(experience)
        raise TaskError(f"an experience must have a task label, got task labels []. {HOW_TO_LABEL}")
    return [int(label) for label in labels]


def stream_of(experience: Any) -> Any:
    """Return the stream that contains an experience, or None."""
    try:
        return getattr(experience, "origin_stream", None)
    except AssertionError:  # raised by Avalanche for an experience without a stream
        return None


def refuse_incremental(experience: Any) -> None:
    """Raise TaskError if the stream spreads its tasks over several experiences, as in class-incremental learning."""
    refuse_part(experience)
    stream = stream_of(experience)
    if not hasattr(stream, "__len__"):
        return
    counts, remaining = Counter(single_task(other) for other in stream), set[int]()
    requested = any(getattr(other, "requests", ()) for other in stream)
    for other in stream if requested or min(counts.values()) > 1 else ():
        label, gone = single_task(other), {t for request in getattr(other, "requests", ()) for t in request.gone}
        if label in remaining - gone:
            raise TaskError(f"task {label}: {_many_parts_error(counts[label])}")
        remaining = (remaining | {label}) - gone


def repeat_error(experience: Any) -> str:
    """Return the error text, with the remedy, for training a task a second time without unlearning it first."""
    refuse_part(experience)
    task = single_task(experience)
    n = sum(list(other.task_labels) == [task] for other in stream_of(experience) or [experience])
    return (
        f"task {task} is already trained and remains: unlearn it first, or give the new data a task label of its own"
        + (f". {_many_parts_error(n)}" if n > 1 else f", task_benchmark(…, first_task={task + 1})")
    )


def _many_parts_error(n: int) -> str:
    return (
        f"{n} experiences of this stream have that task label, as in a class- or domain-incremental stream. "
        f"{HOW_TO_LABEL}. Train parts of one task as one: put AvalancheDataset([e.dataset for e in parts]) into "
        "benchmark_from_datasets(train=[…]); RanPAC also adds them one by one"
    )


def refuse_part(experience: Any) -> None:
    """Raise TaskError if an experience is only a part of a task, made by Avalanche's ``split_online_stream``."""
    if isinstance(experience, OnlineCLExperience):
        n = len(experience.dataset)
        raise TaskError(
            f"an experience of {n} samples is a part of a task, as split_online_stream makes it, and here every "
            f"experience is a whole task: train on the stream that was split, with train_mb_size={n} and train_epochs=1"
        )
