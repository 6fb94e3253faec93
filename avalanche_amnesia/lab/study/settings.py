"""Settings of an experiment: typed, read from one YAML file, and checked before anything runs.

Nothing here needs torch: ``--help`` must be quick.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

_Digits = Literal["SplitDigits", "PermutedDigits", "RotatedDigits"]
_Mnist = Literal["SplitMNIST", "PermutedMNIST", "RotatedMNIST", "SplitFashionMNIST"]
StreamName = Literal[_Digits, _Mnist, "SplitCIFAR10", "SplitCIFAR100", "SplitOmniglot", "Combined"]
NetworkName = Literal["MLP", "CharacterNet", "SmallConvNet", "ResNet18"]
_Own = Literal["AmnesiacHAT", "HAT", "AdaHAT", "DisjointSubnets", "WSN", "PALL", "CLPU-DER++", "Independent"]
MethodKind = Literal[_Own, "Naive", "EWC", "LwF", "Replay", "DER++"]
_Orders = Literal["none", "listed", "published", "at_random", "oldest_first", "newest_first"]
ScenarioName = Literal[_Orders, "bursts", "deadline", "permanent", "mid_task", "relearn"]
Floor = Literal["order", "seed"]
OBEY_NOTHING = ("HAT", "AdaHAT")
"""Kinds of methods that get requests and obey none: what protecting tasks does by itself."""


@dataclass(frozen=True)
class StreamSettings:
    """Data and tasks.

    Attributes:
        name: a function of avalanche_amnesia.benchmarks; Combined: MNIST, Fashion-MNIST, CIFAR-10, an alphabet, digits
        n_tasks: number of tasks
        n_train: training images, stratified and drawn by the seed; null: all
        n_test: test images, likewise
        options: further arguments of that function, such as jpeg, angles or class_order
    """

    name: StreamName = "SplitDigits"
    n_tasks: int = 5
    n_train: int | None = None
    n_test: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkSettings:
    """Feature extractor, the same for every method.

    Attributes:
        name: which one
        widths: units of an MLP's layers, the last of which are the features
    """

    name: NetworkName = "MLP"
    widths: list[int] = field(default_factory=lambda: [256, 100, 64])


@dataclass(frozen=True)
class TrainingSettings:
    """Budget, the same for every method.

    Attributes:
        epochs: passes over each task's training images
        batch_size: images of a mini-batch
        device: where to compute; bits are the same only on one kind of device
    """

    epochs: int = 2
    batch_size: int = 128
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class MethodSettings:
    """A continual-learning method.

    Attributes:
        kind: which one; HAT and AdaHAT get requests and obey none
        optimizer: class of torch.optim
        lr: its learning rate
        options: of the strategy, as plain values; of DarkReplayPlugin for DER++. isolation: planned deals pools by the
            requests; masks, trajectory and unlearning: {…} are the settings of these objects; adjustment: {name:
            adahat, …}, compensation: {name: backup, …} (or draft, rate), repair: joint; shared_head: the classes of one
            head for all tasks (domain-incremental; AmnesiacHAT, HAT and AdaHAT)
    """

    kind: MethodKind
    optimizer: Literal["Adam", "SGD"] = "Adam"
    lr: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScenarioSettings:
    """Unlearning requests.

    Attributes:
        name: a function of avalanche_amnesia.contrib.streams.scenarios
        options: its arguments but n_tasks, such as rate and seed, every, size, iteration, tasks; of listed requests
    """

    name: ScenarioName = "published"
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
