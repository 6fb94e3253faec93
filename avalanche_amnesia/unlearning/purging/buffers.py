"""Replay buffers without some tasks: not merely out of reach, but gone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

from avalanche.benchmarks.utils import (
    AvalancheDataset,
)
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from avalanche.benchmarks.utils.flat_data import FlatData
from torch.utils.data import ConcatDataset, TensorDataset

from avalanche_amnesia.transaction import Transaction

_COUNTS = ("max_size", "_num_exps", "seen_classes", "seen_groups")


def subset_alone(data: AvalancheDataset, kept: Sequence[int]) -> AvalancheDataset:
    """The samples at some positions, in a data set that holds no reference to the others.

    The host's ``subset`` keeps the data sets, labels and logits of all samples, and only hides them. Here whatever
    has no sample left is let go of, and tensors are copied without the rows of others; a data set of another class,
    which makes the samples in its own way, stays.
    """
    result = data.subset(list(kept))
    result._flat_data = _compact(result._flat_data, range(len(result)))
    for attribute in list(result._data_attributes.values()):
        set_attribute(result, attribute, list(attribute))
    return result


def set_attribute(data: AvalancheDataset, attribute: Any, values: list[Any]) -> None:
    """Give a data set other values of one of its attributes, in place."""
    new = DataAttribute(_sequence(values), attribute.name, use_in_getitem=attribute.use_in_getitem)
    data._data_attributes[attribute.name] = new
    if attribute.name in data.__dict__:
        data.__dict__[attribute.name] = new


def _sequence(values: list[Any]) -> FlatData[Any]:
    """Values in two parts: the host fails to append a repeated value (task labels) to what has only one."""
    return FlatData([values[:1], values[1:] or values[:1]], indices=list(range(len(values))))


def _compact(flat: Any, kept: Sequence[int]) -> Any:
    places = [flat._get_idx(i) for i in kept]
    datasets, offsets, position = [], {}, 0
    for number in sorted({number for number, _ in places}):
        inner = sorted({i for of, i in places if of == number})
        dataset = flat._datasets[number]
        if isinstance(dataset, FlatData):
            dataset = _compact(dataset, inner)
        else:
            dataset, inner = _alone(dataset, inner)
        offsets[number] = {old: position + new for new, old in enumerate(inner)}
        position += len(inner)
        datasets.append(dataset)
    result = copy(flat)
    result._datasets = datasets
    result._indices = [offsets[number][i] for number, i in places]
    result._cumulative_sizes = ConcatDataset.cumsum(datasets)
    return result


def _alone(dataset: Any, kept: list[int]) -> tuple[Any, list[int]]:
    """A data set without the samples that are not kept, and which positions of the old one it has."""
    if isinstance(dataset, list):
        return [dataset[i] for i in kept], kept
    if hasattr(dataset, "alone"):  # a task of this package's streams, whose base is the whole stream's
        return dataset.alone(kept), kept
    if type(dataset) is TensorDataset:
        return TensorDataset(*(tensor[kept] for tensor in dataset.tensors)), kept
    return dataset, list(range(len(dataset)))


def purge_policy(policy: Any, tasks: Collection[int], change: Transaction) -> int:
    """Take the samples of tasks out of a storage policy; returns how many there were."""
    groups = getattr(policy, "buffer_groups", None)
    if groups is None:
        return _purge_buffer(policy, tasks, change)
    change.keep(policy, *(name for name in ("buffer_groups", *_COUNTS) if name in vars(policy)))
    removed = sum(purge_policy(group, tasks, change) for group in groups.values())
    left = {key: group for key, group in groups.items() if len(group.buffer)}
    if hasattr(policy, "_num_exps"):  # its keys count experiences: the room of those that are gone is free again
        left = dict(enumerate(left.values()))
        policy._num_exps = len(left)
    for seen in ("seen_classes", "seen_groups"):
        if hasattr(policy, seen):
            setattr(policy, seen, getattr(policy, seen) & set(left))
    policy.buffer_groups = left
    return removed


def _purge_buffer(policy: Any, tasks: Collection[int], change: Transaction) -> int:
    buffer = policy.buffer
    if len(buffer) == 0:
        return 0
    kept = [i for i, task in enumerate(buffer.targets_task_labels) if int(task) not in tasks]
    # Without a sample of theirs too: what the samples are taken from may hold those of every task.
    change.set(policy, buffer=subset_alone(buffer, kept))
    weights = getattr(policy, "_buffer_weights", None)
    if weights is not None:
        change.set(policy, _buffer_weights=weights[kept].clone())
    return len(buffer) - len(kept)


def single_buffers(policy: Any) -> list[Any]:
    """The buffers inside a storage policy that hold samples."""
    groups = getattr(policy, "buffer_groups", None)
    return [policy] if groups is None else [single for group in groups.values() for single in single_buffers(group)]
