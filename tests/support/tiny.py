"""Streams of a few samples and the smallest network, for tests of a single step."""

from collections.abc import Callable
from typing import Any

import torch
from avalanche.benchmarks import CLScenario, nc_benchmark
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from avalanche_amnesia import WSN, AmnesiacHAT, DisjointSubnets, SplitDigits, task_benchmark
from support.strategies import make

KINDS = {"amnesiac": AmnesiacHAT, "wsn": WSN, "pools": DisjointSubnets}


class Net(nn.Module):
    features = 6

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


def strategy(kind: str = "amnesiac", *, net: Any = Net, **options: Any) -> Any:
    return make(KINDS[kind], net=net, **{"optimizer": "sgd", "train_mb_size": 8, "train_epochs": 1, **options})


def samples(n: int = 24, classes: int = 2, first: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), torch.arange(n) % classes + first


def with_targets(x: Tensor, y: Tensor) -> TensorDataset:
    """A data set that the host takes."""
    found = TensorDataset(x, y)
    found.targets = y.tolist()
    return found


def data(n: int = 24, classes: int = 2, first: int = 0) -> TensorDataset:
    """As :func:`samples`, a data set that the host takes."""
    return with_targets(*samples(n, classes, first))


def of_avalanche(task_labels: bool = True) -> CLScenario:
    """Five tasks of two digits as Avalanche makes them; without task labels all of them have the label 0."""
    streams = SplitDigits(1, n_train=400, n_test=200).streams
    train, test = (with_targets(*streams[name][0].tensors) for name in ("train", "test"))
    return nc_benchmark(train, test, 5, task_labels=task_labels, seed=0, class_ids_from_zero_in_each_exp=task_labels)


class Items(Dataset):
    """Items of any kind, which are read one by one; with further attributes."""

    def __init__(self, items: Any, targets: list[int], **attributes: Any) -> None:
        self.items, self.targets = list(items), targets
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


def items(item: Callable[[torch.Generator, int], Any], **attributes: Any) -> Items:
    """Sixteen items that a function makes of a generator and a label, 0 or 1."""
    targets = [i % 2 for i in range(16)]
    return Items((item(torch.Generator().manual_seed(i), y) for i, y in enumerate(targets)), targets, **attributes)


def blank(n_tasks: int = 5) -> Any:
    """Tasks of two zero samples, one class each, for tests of schedules."""
    x, y = torch.zeros(2 * n_tasks, 3), torch.arange(2 * n_tasks) % n_tasks
    return task_benchmark((x, y), (x, y), [[task] for task in range(n_tasks)])


def tasks(parts: Any = ((0, 1), (2, 3)), given: Any = None) -> Any:
    given = samples(classes=4) if given is None else given
    return task_benchmark(given, given, parts)
