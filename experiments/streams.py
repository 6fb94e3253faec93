"""Streams of the method comparison: data, network, training and requests of each.

Validation: a sixth of every class's training images stands in for the test images, which are then never read. Settings
are chosen so, on seeds of their own.
"""

import io
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch
from avalanche.benchmarks import CLExperience, CLScenario
from PIL import Image
from torch import Tensor, nn

from avalanche_amnesia.benchmarks import task_benchmark, with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.benchmarks.families import Images, permuted, rotated, split
from avalanche_amnesia.benchmarks.idx import load_idx
from avalanche_amnesia.benchmarks.subsets import stratified
from avalanche_amnesia.benchmarks.transforms import Scale, Standardise
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP
from avalanche_amnesia.models.modes import evaluating


class SmallConvNet(nn.Module):
    """Three convolutions of 3 × 3, each with BatchNorm, ReLU and a pool, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Linear(128 * 4 * 4, 128)
        self.features = 128

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of images of 32 × 32 pixels."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.pool(torch.relu(norm(convolution(x))))
        return torch.relu(self.linear(x.flatten(1)))


class CharacterNet(nn.Module):
    """Two convolutions and one linear layer, for images of 28 × 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 24, 5, padding=2), nn.Conv2d(24, 48, 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Linear(48 * 7 * 7, 128)
        self.features = 128

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of drawings."""
        x = self.pool(torch.relu(self.first(x)))
        x = self.pool(torch.relu(self.second(x)))
        return torch.relu(self.linear(x.flatten(1)))


@dataclass(frozen=True)
class Stream:
    """One stream of the comparison.

    Attributes:
        images: all images below the data root.
        tasks: makes the tasks from images, their number and a seed.
        network: makes the feature extractor.
        requests: task label after which → task labels to unlearn.
        n_tasks: number of tasks.
        n_train: training images, stratified and drawn by the seed; None: all.
        lr: learning rate of Adam.
        training: epochs and size of a mini-batch.
    """

    images: Callable[[Path], Images]
    tasks: Callable[[Images, int, int], CLScenario]
    network: Callable[[], nn.Module]
    requests: Mapping[int, Sequence[int]]
    n_tasks: int = 5
    n_train: int | None = None
    lr: float = 1e-3
    training: Mapping[str, int] = field(default_factory=lambda: {"train_mb_size": 128, "train_epochs": 2})

    def benchmark(self, root: Path, seed: int, validation: bool = False) -> CLScenario:
        """Tasks with their requests."""
        images = self.images(root)
        images = (_held_out(images) if validation else images).subset(self.n_train, None, seed)
        return with_unlearning(self.tasks(images, self.n_tasks, seed), self.requests)

    @property
    def requested(self) -> frozenset[int]:
        """Labels of the tasks that are unlearned by the end."""
        return frozenset(task for tasks in self.requests.values() for task in tasks)


def accuracy_on(model: nn.Module, experience: CLExperience) -> float:
    """Share of an experience's samples that a model classifies right."""
    x, y = task_data(experience)
    with evaluating(model):
        return accuracy(torch.cat([model(part, experience.task_label) for part in x.split(1000)]), y)


def _held_out(images: Images) -> Images:
    x, y = images.train
    out = torch.zeros(len(y), dtype=torch.bool)
    out[stratified(y, len(y) // 6, 0, "validation")] = True
    return replace(images, train=(x[~out], y[~out]), test=(x[out], y[out]))


def _idx(name: str) -> Callable[[Path], Images]:
    standard = {"MNIST": Standardise(0.1307, 0.3081), "FashionMNIST": Standardise(0.2860, 0.3530)}[name]

    @cache
    def load(root: Path) -> Images:
        return Images(*load_idx(name, root, False), before=(Scale(255),), after=(standard,))

    return load


@cache
def _cifar10(root: Path) -> Images:
    """CIFAR-10 by torchvision; where it is not, ``cifar10-jpeg/cifar10_jpeg.npz``, compressed to JPEG of quality 75."""
    jpeg = root / "cifar10-jpeg" / "cifar10_jpeg.npz"
    if jpeg.exists():
        parts = [_unpacked(jpeg, part) for part in ("train", "test")]
    else:
        from torchvision.datasets import CIFAR10

        sets = [CIFAR10(os.fspath(root), train=train, download=True) for train in (True, False)]
        parts = [(torch.from_numpy(s.data), torch.tensor(s.targets)) for s in sets]
    train, test = ((x.permute(0, 3, 1, 2).contiguous(), y.long()) for x, y in parts)
    return Images(train, test, before=(Scale(255),), after=(Standardise(0.473, 0.251),))


def _unpacked(file: Path, part: str) -> tuple[Tensor, Tensor]:
    with np.load(file, allow_pickle=False) as arrays:
        data, ends = arrays[f"{part}_jpeg"].tobytes(), arrays[f"{part}_offsets"]
        labels = torch.from_numpy(arrays[f"{part}_labels"])
    pairs = pairwise(ends)
    return torch.from_numpy(np.stack([np.array(Image.open(io.BytesIO(data[a:b]))) for a, b in pairs])), labels


def _drawings(root: Path) -> tuple[Tensor, Tensor]:
    """Omniglot's small background sets: drawings, and characters, those of one alphabet in one hundred."""
    alphabets: dict[str, dict[str, int]] = {}
    x, y = [], []
    for number in (1, 2):
        with zipfile.ZipFile(root / "omniglot-small" / f"images_background_small{number}.zip") as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(".png")):
                _, alphabet, character, _ = name.split("/")
                known = alphabets.setdefault(alphabet, {})
                y.append(100 * list(alphabets).index(alphabet) + known.setdefault(character, len(known)))
                ink = Image.open(io.BytesIO(archive.read(name))).convert("L").resize((28, 28), Image.Resampling.BOX)
                x.append(255 - torch.from_numpy(np.array(ink)))
    return torch.stack(x)[:, None], torch.tensor(y)


@cache
def _omniglot(root: Path) -> Images:
    x, y = _drawings(root)
    learned = torch.zeros(len(y), dtype=torch.bool)
    learned[stratified(y, 14 * len(y) // 20, 0, "train")] = True  # the same for all seeds
    return Images((x[learned], y[learned]), (x[~learned], y[~learned]), before=(Scale(255),))


def _alphabets(images: Images, n_tasks: int, seed: int) -> CLScenario:
    classes = [list(alphabet) for _, alphabet in groupby(images.classes, lambda character: character // 100)][:n_tasks]
    return task_benchmark(images.train, images.test, classes, transforms=[images.around(None)] * n_tasks)


def _permuted(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return permuted(images, n_tasks, seed)


def _rotated(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return rotated(images, n_tasks, None)


def _split(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return split(images, n_tasks, None)


def _mlp(*widths: int) -> Callable[[], nn.Module]:
    return lambda: MLP(784, hidden=widths[:-1], features=widths[-1])


_FIVE = {1: [0], 3: [1], 4: [4]}
"""Requests of the published schedule, from 0: after the second task the first, and so on."""
_TWENTY = {1: [0], 3: [1], 4: [4], 6: [5], 8: [6], 9: [9], 11: [10], 13: [11], 14: [14], 16: [15], 18: [16], 19: [19]}
_WIDE, _NARROW = _mlp(256, 256), _mlp(256, 100, 64)

STREAMS = {
    "permuted": Stream(_idx("MNIST"), _permuted, _NARROW, _FIVE),
    "permuted 20": Stream(
        _idx("MNIST"),
        _permuted,
        _WIDE,
        _TWENTY,
        n_tasks=20,
        n_train=2000,
        training={"train_mb_size": 64, "train_epochs": 5},
    ),
    "rotated": Stream(
        _idx("MNIST"),
        _rotated,
        _NARROW,
        _FIVE,
        n_train=6000,
        training={"train_mb_size": 64, "train_epochs": 5},
    ),
    "split fashion": Stream(_idx("FashionMNIST"), _split, _NARROW, _FIVE),
    "split cifar": Stream(
        _cifar10,
        _split,
        SmallConvNet,
        _FIVE,
        n_train=20_000,  # of 50,000: three seeds of every method are to fit into an hour
        training={"train_mb_size": 64, "train_epochs": 3},
    ),
    "omniglot": Stream(
        _omniglot,
        _alphabets,
        CharacterNet,
        {2: [0], 4: [3], 6: [1]},
        n_tasks=8,
        training={"train_mb_size": 32, "train_epochs": 15},
    ),
}
