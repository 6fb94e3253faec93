"""Streams of the method comparison: for each, its data, tasks, network, training settings and unlearning requests.

For validation, a sixth of every class's training images is held out and replaces the test images. Settings are chosen
on these images, with other seeds than the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from avalanche.benchmarks import CLExperience, CLScenario
from torch import nn

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.benchmarks.families import Images, permuted, split, stratified_positions
from avalanche_amnesia.contrib.streams import CharacterNet, SmallConvNet
from avalanche_amnesia.contrib.streams.image_sets import (
    JPEG,
    Standardise,
    cifar10_jpeg,
    load,
    rotated,
)
from avalanche_amnesia.contrib.streams.scenarios import published
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from experiments.glyphs import GlyphNet, glyphs, held_out_fonts
from experiments.omniglot import by_alphabet, omniglot


@dataclass(frozen=True)
class Stream:
    """Definition of one stream of the comparison: functions that build its parts, and its training settings.

    Attributes:
        images: function of the data root; returns all images.
        tasks: function of images, number of tasks and seed; returns the benchmark.
        network: function of a scale of all widths (default 1); returns the feature extractor.
        requests: label of the task after which the request comes → labels of the tasks to unlearn.
        n_tasks: number of tasks.
        n_train: number of training images, stratified and drawn by the seed; None: all.
        lr: learning rate of Adam.
        training: number of epochs, and mini-batch size.
        validation: function of the data root; returns training images with held-out ones as test images; None:
            :func:`held_out`.
        trials: number of settings to try per method.
    """

    images: Callable[[Path], Images]
    tasks: Callable[[Images, int, int], CLScenario]
    network: Callable[..., nn.Module]
    requests: Mapping[int, Sequence[int]]
    n_tasks: int = 5
    n_train: int | None = None
    lr: float = 1e-3
    training: Mapping[str, int] = field(default_factory=lambda: {"train_mb_size": 128, "train_epochs": 2})
    validation: Callable[[Path], Images] | None = None
    trials: int = 6

    def benchmark(self, root: Path, seed: int, validation: bool = False, shard: slice = slice(None)) -> CLScenario:
        """Return the benchmark on ``shard`` of the training images; with ``validation``, tests use held-out images."""
        if validation and self.validation is not None:
            images = self.validation(root)
        else:
            images = held_out(self.images(root)) if validation else self.images(root)
        images = images.subset(self.n_train, None, seed)
        images = replace(images, train=(images.train[0][shard], images.train[1][shard]))
        return with_unlearning(self.tasks(images, self.n_tasks, seed), self.requests)

    def narrow(self, n: int) -> nn.Module:
        """Return the widest network of which ``n`` copies have at most as many parameters as the stream's network."""
        most, low, high = size_of(self.network()) / n, 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if size_of(self.network(middle)) <= most else (low, middle)
        return self.network(low)

    @property
    def requested(self) -> frozenset[int]:
        """Return the labels of all tasks with an unlearning request."""
        return frozenset(task for tasks in self.requests.values() for task in tasks)


def size_of(network: nn.Module) -> int:
    """Return the number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def accuracy_on(model: nn.Module, experience: CLExperience) -> float:
    """Return the accuracy of a model on an experience, in [0, 1]."""
    device = next(model.parameters()).device
    x, y = (part.to(device) for part in task_data(experience))
    with evaluation_mode(model):
        return accuracy(torch.cat([model(part, experience.task_label) for part in x.split(1000)]), y)


def held_out(images: Images) -> Images:
    """Return the training images only, with a sixth of every class held out as test images."""
    x, y = images.train
    out = torch.zeros(len(y), dtype=torch.bool)
    out[stratified_positions(y, len(y) // 6, 0, "validation")] = True
    return replace(images, train=(x[~out], y[~out]), test=(x[out], y[out]))


def _idx(name: str) -> Callable[[Path], Images]:
    standard = {"MNIST": Standardise(0.1307, 0.3081), "FashionMNIST": Standardise(0.2860, 0.3530)}[name]

    @cache
    def images(root: Path) -> Images:
        return Images(*load(name, root, False), before=(Standardise(0, 255),), after=(standard,))

    return images


@cache
def _cifar10(root: Path) -> Images:
    """Return CIFAR-10 from the file ``cifar10_jpeg.npz`` (JPEG, quality 75) if it exists, else from torchvision."""
    parts = cifar10_jpeg(root) if (root / JPEG).exists() else load("CIFAR10", root, True)
    return Images(*parts, before=(Standardise(0, 255),), after=(Standardise(0.473, 0.251),))


def _alphabets(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return by_alphabet(images, n_tasks)


def _permuted(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return permuted(images, n_tasks, seed)


def _rotated(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return rotated(images, n_tasks, None)


def _split(images: Images, n_tasks: int, seed: int) -> CLScenario:
    return split(images, n_tasks, None)


def _mlp(*widths: int) -> Callable[..., nn.Module]:
    def make(scale: float = 1.0) -> nn.Module:
        *hidden, features = (max(1, round(scale * width)) for width in widths)
        return MLP(784, hidden=hidden, features=features)

    return make


_FIVE, _TWENTY = published(5).requests, published(20).requests
_WIDE, _NARROW = _mlp(256, 256), _mlp(256, 100, 64)

STREAMS = {
    "permuted": Stream(_idx("MNIST"), _permuted, _NARROW, _FIVE, trials=12),
    "permuted 20": Stream(
        _idx("MNIST"),
        _permuted,
        _WIDE,
        _TWENTY,
        n_tasks=20,
        n_train=2000,
        training={"train_mb_size": 64, "train_epochs": 5},
        trials=12,
    ),
    "rotated": Stream(
        _idx("MNIST"),
        _rotated,
        _NARROW,
        _FIVE,
        n_train=6000,
        training={"train_mb_size": 64, "train_epochs": 5},
        trials=12,
    ),
    "split fashion": Stream(_idx("FashionMNIST"), _split, _NARROW, _FIVE, trials=12),
    "split cifar": Stream(
        _cifar10,
        _split,
        SmallConvNet,
        _FIVE,
        n_train=20_000,  # of 50,000, so that three seeds of each method need less than an hour
        training={"train_mb_size": 64, "train_epochs": 3},
    ),
    "omniglot": Stream(
        omniglot,
        _alphabets,
        CharacterNet,
        {2: [0], 4: [3], 6: [1]},
        n_tasks=8,
        training={"train_mb_size": 32, "train_epochs": 15},
        trials=12,
    ),
}

GLYPHS = Stream(
    glyphs,
    _split,
    GlyphNet,
    published(12).requests,
    n_tasks=12,
    n_train=12_000,
    training={"train_mb_size": 32, "train_epochs": 3},
    validation=held_out_fonts,
    trials=12,
)
"""Stream used only by :mod:`experiments.comparison`, like ``PERMUTED_FASHION``."""
PERMUTED_FASHION = replace(STREAMS["rotated"], images=_idx("FashionMNIST"), tasks=_permuted)
