"""The integer labels of whatever the user gives as data."""

from collections.abc import Iterable, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from avalanche_amnesia import checks

Data = tuple[Tensor, Tensor] | Dataset[Any]


def labels_of(data: Data, name: str) -> Tensor:
    """The labels of a tensor pair or data set, in its order."""
    if isinstance(data, tuple):
        length = len(data[0])
        labels = _as_int64(data[1], name)
    else:
        length = len(cast(Sized, data))
        targets = getattr(data, "targets", None)
        labels = _as_int64(_read_items(data, length) if targets is None else targets, name)
    if len(labels) != length:
        raise ValueError(f"{name}: {length} samples but {len(labels)} labels; give one label per sample")
    return labels


def _read_items(data: Dataset[Any], length: int) -> list[Any]:
    # Items may come with random transforms, and building a benchmark must not move the user's random stream.
    with torch.random.fork_rng(devices=[]):
        return [data[item][1] for item in range(length)]


def _as_int64(y: Iterable[Any], name: str) -> Tensor:
    if hasattr(y, "dtype"):
        labels = torch.as_tensor(y)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or labels.ndim != 1:
            raise ValueError(
                f"{name}: labels have dtype {labels.dtype} and shape {tuple(labels.shape)}; "
                f"give integer class labels of shape (n,)"
            )
        return labels.to(torch.int64)
    return torch.tensor([_as_int(label, name) for label in y], dtype=torch.int64)


def _as_int(label: Any, name: str) -> int:
    number = checks.integer(label)
    if number is not None:
        return number
    raise ValueError(f"{name}: {label!r} is no class label; labels must be integers")
