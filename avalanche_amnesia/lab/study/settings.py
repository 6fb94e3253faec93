"""Settings of an experiment: typed, read from one YAML file, and checked before anything runs; what they name.

Nothing here needs torch: ``--help`` must be quick.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

METHODS = {
    "AmnesiacHAT": "HAT that unlearns: masks over units; later tasks have heads in store for what they lose",
    "HAT": "learned masks over units, whose parameters later tasks leave alone; a control, obeys no request",
    "AdaHAT": "HAT in which later tasks may move used parameters a little; a control, obeys no request",
    "DisjointSubnets": "single weights of its own for every task; unlearns exactly",
    "WSN": "a task's mask chooses among weights that all tasks share; those of earlier tasks stay",
    "PALL": "WSN with a few steps of repair on kept samples after a request",
    "CLPU-DER++": "a side network for every task that may be requested; unlearns exactly",
    "Independent": "a network for every task; unlearns exactly",
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
    "permanent": "every few tasks one is permanent; each of the others goes one task later",
    "mid_task": "in the middle of a task's training the one before it",
    "relearn": "tasks go, and come again at the end",
}
Floor = Literal["order", "seed"]
OBEY_NOTHING = ("HAT", "AdaHAT")
"""Kinds of methods that get requests and obey none: what protecting tasks does by itself."""
TRAIN_AGAIN = ("DisjointSubnets", "Independent")
"""Kinds of methods that can unlearn samples of a task."""


@dataclass(frozen=True)
class StreamSettings:
    """Data and tasks.

    Attributes:
        name: which ones; a function of your own is called with n_tasks, the options, and what it takes of seed, root,
            download, n_train and n_test
        n_tasks: number of tasks
        n_train: training images, stratified and drawn by the seed; null: all
        n_test: test images, likewise
        options: further arguments of that function, such as jpeg, angles or class_order
    """

    name: Annotated[str, STREAMS] = "SplitDigits"
    n_tasks: Annotated[int, 1] = 5
    n_train: int | None = None
    n_test: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSettings:
    """Feature extractor, the same for every method.

    Attributes:
        name: which one; a class or function of your own is called with the options, and with shape (of an input) and
            widths where it takes them, and returns features
        widths: units of an MLP's layers, the last of which are the features
        options: further arguments of a network of your own
    """

    name: Annotated[str, NETWORKS] = "MLP"
    widths: list[int] = field(default_factory=lambda: [256, 100, 64])
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSettings:
    """Budget, the same for every method.

    Attributes:
        epochs: passes over each task's training images
        batch_size: images of a mini-batch
        device: where to compute; bits are the same only on one kind of device
    """

    epochs: Annotated[int, 1] = 2
    batch_size: Annotated[int, 1] = 128
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class MethodSettings:
    """A continual-learning method.

    Attributes:
        kind: which one; HAT and AdaHAT get requests and obey none; of your own: a class of strategies, whose __init__
            names the class of its model (model: MaskedModel), or one in the way of Avalanche's
        optimizer: class of torch.optim, or MODULE:NAME
        lr: its learning rate
        options: of the strategy, as plain values; of DarkReplayPlugin for DER++. isolation: planned assigns the slots
            of DisjointSubnets by the requests; masks, trajectory and unlearning: {…} are the settings of these
            objects; adjustment: {name: adahat, …}, compensation: {name: backup, …}, repair: joint
    """

    kind: Annotated[str, METHODS]
    optimizer: str = "Adam"
    lr: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScenarioSettings:
    """Unlearning requests.

    Attributes:
        name: which ones; a function of your own is called with n_tasks and the options, and returns a Scenario
        options: its arguments but n_tasks, such as rate and seed, every, size, iteration, tasks; of listed requests,
            such as {3: [0], 4: {task: 1, samples: [0, 7]}}
    """

    name: Annotated[str, SCENARIOS] = "published"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """An experiment: every method under every request scenario with every seed.

    Attributes:
        name: of the experiment, and of the folder of its results
        methods: name of a row of the tables → a method and its settings
        scenarios: name → when which tasks are requested
        seeds: every draw of a run derives from its seed and the task
        stream: data and tasks
        network: feature extractor
        training: budget
        floors: noise floors of the divergences; each is a retrained model more per request
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
    """One run of an experiment.

    Attributes:
        experiment: that it belongs to.
        method: name in its ``methods``.
        scenario: name in its ``scenarios``.
        seed: of everything.
    """

    experiment: Experiment
    method: str
    scenario: str
    seed: int


def named(name: str, place: str, known: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """One of what is known, or what ``module:name`` names, also in the working directory; errors name the place."""
    if name in known:
        return known[name]
    module, _, inside = name.partition(":")
    if not module or not inside:
        raise ValueError(f"{place} must be MODULE:NAME, got {name!r}: for example train:make_strategy")
    if os.getcwd() not in sys.path:  # and stays there: what the module imports later lies beside it
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), inside)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{place} {name}: {error}; run the command where {module}.py lies") from error
