"""Settings of an experiment as data classes; descriptions of built-in methods, streams, networks and scenarios.

This module must not import torch, because that would slow down ``--help``.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from avalanche_amnesia.saving.typed import known_name

METHODS = {
    "AmnesiacHAT": "HAT that unlearns: masks over units; later tasks have spare heads, in case they lose units",
    "HAT": "learned masks over units, whose parameters later tasks leave alone; a control, obeys no request",
    "AdaHAT": "HAT in which later tasks may move used parameters a little; a control, obeys no request",
    "DisjointSubnets": "single weights of its own for every task; unlearns exactly",
    "WSN": "a task's mask chooses among weights that all tasks share; those of earlier tasks stay",
    "PALL": "WSN with a few steps of repair on kept samples after a request",
    "CLPU-DER++": "a side network for every task that may be requested; unlearns exactly",
    "Independent": "a network for every task; unlearns exactly",
    "RanPAC": "a regression on features of a frozen network; unlearns exactly, by subtraction",
    "Naive": "Avalanche's fine-tuning, task after task",
    "EWC": "Avalanche's elastic weight consolidation",
    "LwF": "Avalanche's learning without forgetting, by distillation",
    "Replay": "Avalanche's replay of kept samples",
    "DER++": "replay of kept samples with the logits of their time",
}
STREAMS = {
    "SplitDigits": "the ten classes of scikit-learn's digits in equal parts; needs no data root",
    "PermutedDigits": "digits, the pixels in another order for each task; needs no data root",
    "RotatedDigits": "digits, turned by an angle of the task's own; needs no data root",
    "SplitMNIST": "the ten classes of MNIST in equal parts",
    "PermutedMNIST": "MNIST, the pixels in another order for each task",
    "RotatedMNIST": "MNIST, turned by an angle of the task's own",
    "SplitFashionMNIST": "the ten classes of Fashion-MNIST in equal parts",
    "SplitCIFAR10": "the ten classes of CIFAR-10 in equal parts",
    "SplitCIFAR100": "the hundred classes of CIFAR-100 in equal parts",
}
DATA_SETS = {
    "digits": "1,797 digits of 8 × 8, inside scikit-learn (Split-, Permuted-, RotatedDigits)",
    "MNIST": "70,000 digits of 28 × 28 (Split-, Permuted-, RotatedMNIST)",
    "FashionMNIST": "70,000 clothes, 28 × 28 (SplitFashionMNIST)",
    "CIFAR10": "60,000 colour images of 32 × 32, 10 classes (SplitCIFAR10)",
    "CIFAR10-JPEG": "the same from JPEG of quality 75 (jpeg: true)",
    "CIFAR100": "60,000 colour images of 32 × 32, 100 classes (SplitCIFAR100)",
}
NETWORKS = {
    "MLP": "layers of the given widths",
    "CharacterNet": "convolutions for characters of 28 × 28",
    "SmallConvNet": "a few convolutions for colour images of 32 × 32",
    "ResNet18": "for colour images of 32 × 32",
}
SCENARIOS = {
    "none": "no request",
    "listed": "requests as the settings list them",
    "published": "the AmnesiacHAT paper's: task 0 after 1, 1 after 3, 4 after 4",
    "at_random": "after every task each remaining one with a probability",
    "oldest_first": "after every few tasks the one learned first",
    "newest_first": "after every few tasks the one just learned",
    "bursts": "after every few tasks several at once",
    "deadline": "tasks become permanent after a few more; requests come at the last moment",
    "permanent": "every few tasks one is permanent; each other task is unlearned one task later",
    "mid_task": "in the middle of a task's training the one before it",
    "relearn": "tasks go, and come again at the end",
}
Floor = Literal["order", "seed"]
OBEY_NOTHING = ("HAT", "AdaHAT")
"""Methods that record requests but do not unlearn: controls for the protection of tasks without unlearning."""
FORGET_SAMPLES = ("DisjointSubnets", "Independent", "RanPAC")
"""Methods that can unlearn single samples of a task."""


@dataclass(frozen=True)
class StreamSettings:
    """Settings of the data and of the split into tasks.

    Attributes:
        name: a built-in stream, or a function of your own; it is called with n_tasks, the options, and those of seed,
            root, n_train and n_test that it accepts
        n_tasks: number of tasks
        n_train: number of training images, a stratified sample drawn with the seed; null: all
        n_test: number of test images, drawn in the same way
        options: further arguments of the stream, such as jpeg, download, angles or class_order
    """

    name: Annotated[str, STREAMS] = "SplitDigits"
    n_tasks: Annotated[int, 1] = 5
    n_train: int | None = None
    n_test: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of the feature extractor, which is equal for every method.

    Attributes:
        name: a built-in network, or a class or function of your own that returns one; it is called with the options,
            and with shape (of an input) and widths if it accepts them
        widths: number of units of each MLP layer; the last layer gives the features
        options: further arguments of a network of your own
    """

    name: Annotated[str, NETWORKS] = "MLP"
    widths: list[int] = field(default_factory=lambda: [256, 100, 64])
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training budget, which is equal for every method.

    Attributes:
        epochs: passes over each task's training images
        batch_size: number of images in a mini-batch
        device: type of device; results are equal bit for bit only on the same type
    """

    epochs: Annotated[int, 1] = 2
    batch_size: Annotated[int, 1] = 128
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class MethodSettings:
    """Settings of a continual-learning method.

    Attributes:
        kind: a built-in method (HAT and AdaHAT record requests but do not unlearn), or a strategy class of your own,
            like Avalanche's or with an annotated model in its __init__ (model: MaskedModel)
        optimizer: class of torch.optim, or MODULE:NAME
        lr: learning rate of the optimizer
        options: arguments of the strategy as plain values; for DER++, of DarkReplayPlugin. isolation: planned assigns
            the slots of DisjointSubnets by the requests; masks, trajectory and unlearning: {…} are the settings of
            these objects; adjustment: {name: adahat, …}, compensation: {name: backup, …}, repair: joint
    """

    kind: Annotated[str, METHODS]
    optimizer: str = "Adam"
    lr: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScenarioSettings:
    """Settings of the scenario: which tasks are to be unlearned, and when.

    Attributes:
        name: a built-in scenario, or a function of your own that makes a Scenario from n_tasks and the options
        options: arguments except n_tasks, such as rate and seed, every, size, iteration, tasks; for listed: requests,
            such as {3: [0], 4: {task: 1, samples: [0, 7]}}
    """

    name: Annotated[str, SCENARIOS] = "published"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """An experiment: every method, under every scenario (schedule of requests to unlearn), with every seed.

    Attributes:
        name: name of the experiment and of its results folder
        methods: name of a table row → a method and its settings
        scenarios: name → request scenario and its settings
        seeds: one run per seed; all its random draws depend on the seed and the task
        stream: data and tasks
        network: feature extractor
        training: training budget
        floors: noise floors of the divergences; each needs one more retrained model per request
    """

    name: str
    methods: dict[str, MethodSettings]
    scenarios: dict[str, ScenarioSettings] = field(default_factory=lambda: {"published": ScenarioSettings()})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    stream: StreamSettings = field(default_factory=StreamSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    floors: list[Floor] = field(default_factory=lambda: ["order"])


@dataclass(frozen=True)
class Cell:
    """One run of an experiment: one method, under one scenario (schedule of requests to unlearn), with one seed.

    Attributes:
        experiment: the experiment.
        method: name in the experiment's ``methods``.
        scenario: name in the experiment's ``scenarios``.
        seed: seed of the run.
    """

    experiment: Experiment
    method: str
    scenario: str
    seed: int


def find_named(name: str, path: str, known: Mapping[str, Any] | None = None) -> Any:
    """Return ``known[name]``, or import ``name`` (``module:object``); errors mention ``path``, the setting's place."""
    if known:
        if name in known:
            return known[name]
        known_name(name, known, path)
    module, _, inside = name.partition(":")
    if not module or not inside:
        raise ValueError(f"{path} must be MODULE:NAME, got {name!r}: for example train:make_strategy")
    if os.getcwd() not in sys.path:  # not removed: the module may import its neighbours later
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), inside)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path} {name}: {error}; run the command where {module}.py lies") from error
