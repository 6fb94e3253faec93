"""Samples that the host's replay buffers keep, as values of a saved state."""

from __future__ import annotations

from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset, make_avalanche_dataset
from avalanche.benchmarks.utils.classification_dataset import TaskAwareSupervisedClassificationDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from avalanche.benchmarks.utils.flat_data import FlatData

from avalanche_amnesia.benchmarks.data import TensorTask
from avalanche_amnesia.saving.files import StateError


def taken(data: AvalancheDataset) -> dict[str, Any]:
    """Samples of a data set and what it says of each: tensors and lists."""
    others = sorted({type(leaf).__name__ for leaf in _leaves(data._flat_data) if not isinstance(leaf, TensorTask)})
    if others or _transforms(data._flat_data):
        raise StateError(
            f"a replay buffer holds samples of {', '.join(others) or 'transformed data'}, perhaps another one at "
            "every call: only data in tensors (task_benchmark with pairs of tensors) can be saved"
        )
    rows = [data[i] for i in range(len(data))]
    return {
        "task_aware": isinstance(data, TaskAwareSupervisedClassificationDataset),
        "x": torch.stack([row[0] for row in rows]) if rows else None,
        "y": [int(row[1]) for row in rows],
        "attributes": {
            name: (list(attribute), attribute.use_in_getitem) for name, attribute in data._data_attributes.items()
        },
    }


def made(values: dict[str, Any]) -> AvalancheDataset:
    """A data set of the same samples in the same order."""
    if values["x"] is None:
        return AvalancheDataset([])
    samples = TensorTask(values["x"], torch.arange(len(values["y"])), values["y"])
    attributes = [
        DataAttribute(_sequence(items), name, use_in_getitem=use) for name, (items, use) in values["attributes"].items()
    ]
    if values["task_aware"]:
        return TaskAwareSupervisedClassificationDataset([samples], data_attributes=attributes)
    return make_avalanche_dataset(AvalancheDataset([samples]), data_attributes=attributes)


def _sequence(values: list[Any]) -> FlatData[Any]:
    """Values in two parts: the host fails to append a repeated value (task labels) to what has only one."""
    return FlatData([values[:1], values[1:] or values[:1]], indices=list(range(len(values))))


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, FlatData):
        return [leaf for inner in data._datasets for leaf in _leaves(inner)]
    return [data]


def _transforms(data: Any) -> bool:
    """Tell whether anything changes the samples on their way out."""
    if not isinstance(data, FlatData):
        return False
    groups = getattr(data, "_transform_groups", None)
    pairs = groups.transform_groups.values() if groups is not None else ()
    own = any(pair is not None and any(pair) for pair in pairs)  # None: a group without transforms that was asked for
    return own or any(_transforms(inner) for inner in data._datasets)
