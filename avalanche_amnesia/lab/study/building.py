"""Streams, networks and strategies from settings."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from avalanche.benchmarks import CLScenario
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import EWC, LwF, Naive, Replay
from torch import nn

from avalanche_amnesia import benchmarks
from avalanche_amnesia.benchmarks.requests import with_unlearning
from avalanche_amnesia.checks import known_options
from avalanche_amnesia.contrib import streams
from avalanche_amnesia.contrib.ablations import ScaledUpdatesPlugin
from avalanche_amnesia.contrib.baselines import (
    PALL,
    CLPUDERpp,
    DarkReplayPlugin,
    Independent,
    NetworkPerTask,
    SideNetworks,
)
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.contrib.streams.scenarios import SCENARIOS, Scenario
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.lab.study.settings import (
    OBEY_NOTHING,
    Cell,
    MethodSettings,
    NetworkSettings,
    ScenarioSettings,
    StreamSettings,
)
from avalanche_amnesia.models import MLP, DisjointModel, MaskedModel, SubnetModel, TaskNormModel
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AmnesiacHAT, DisjointSubnets, HardAttention, ScoredWeights
from avalanche_amnesia.training.plugins import InMemoryLoaderPlugin, SeedingPlugin, TrajectoryPlugin, UnlearningPlugin
from avalanche_amnesia.training.update_rules import RULES

OWN: dict[str, tuple[type, type]] = {
    "AmnesiacHAT": (AmnesiacHAT, MaskedModel),
    "HAT": (HAT, MaskedModel),
    "AdaHAT": (AdaHAT, MaskedModel),
    "DisjointSubnets": (DisjointSubnets, DisjointModel),
    "WSN": (WSN, SubnetModel),
    "PALL": (PALL, SubnetModel),
    "CLPU-DER++": (CLPUDERpp, SideNetworks),
    "Independent": (Independent, NetworkPerTask),
}
"""Kind of method → strategy of this package, and the model that it trains."""
STOCK: dict[str, type] = {"Naive": Naive, "EWC": EWC, "LwF": LwF, "Replay": Replay, "DER++": Naive}
"""Kind of method → strategy of Avalanche's, which two plugins make forget on request."""
MEMORY = 50
"""Samples of each task that DER++ keeps; Replay as many times the stream's tasks, shared by those that it has."""
OF_MODELS = ("density", "shared_head")
"""Options of a method that are its model's: share of weights of a WSN's task; classes of one head for all tasks."""
Maker = Callable[..., Any]


def make_stream(
    settings: StreamSettings, seed: int, root: str | Path | None = None, download: bool = False
) -> CLScenario:
    """The tasks, without requests."""
    room = benchmarks if hasattr(benchmarks, settings.name) else streams
    make = _combined if settings.name == "Combined" else getattr(room, settings.name)
    takes = inspect.signature(make).parameters
    given = {"n_train": settings.n_train, "n_test": settings.n_test}
    known_options([name for name, value in given.items() if value is not None], takes, settings.name)
    known_options(settings.options, takes, settings.name)
    offered = given | {"seed": seed, "root": root, "download": download} | settings.options
    stream: CLScenario = make(settings.n_tasks, **{name: value for name, value in offered.items() if name in takes})
    return stream


def _combined(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    root: str | Path | None = None,
    download: bool = False,
    jpeg: bool = False,
) -> CLScenario:
    """The first ``n_tasks`` of five unlike tasks, in colour images of 32 × 32 pixels."""
    given: dict[str, Any] = {"seed": seed, "n_train": n_train, "n_test": n_test, "root": root, "download": download}
    makers: list[Callable[[], CLScenario]] = [
        lambda: streams.SplitMNIST(1, **given),
        lambda: streams.SplitCIFAR10(1, **given, jpeg=jpeg),
        lambda: streams.SplitFashionMNIST(1, **given),
        lambda: streams.SplitOmniglot(1, root=root),
        lambda: benchmarks.SplitDigits(1, seed=seed),
    ]
    if not 1 <= n_tasks <= len(makers):
        raise ValueError(f"Combined has 1 to {len(makers)} tasks, got n_tasks={n_tasks}")
    return streams.combined_benchmark([make() for make in makers[:n_tasks]])


def make_scenario(settings: ScenarioSettings, n_tasks: int) -> Scenario:
    """The requests of a stream."""
    make = SCENARIOS[settings.name]
    known_options(settings.options, [*inspect.signature(make).parameters][1:], f"scenario {settings.name}")
    return make(n_tasks, **settings.options)


def make_network(settings: NetworkSettings, example: torch.Tensor) -> nn.Module:
    """A feature extractor; draws from torch's global stream."""
    if settings.name == "MLP":
        *hidden, features = settings.widths
        return MLP(example.numel(), hidden=hidden, features=features)
    network: nn.Module = getattr(streams, {"ResNet18": "cifar_resnet18"}.get(settings.name, settings.name))()
    return network


def make_strategy(
    settings: MethodSettings, network: Callable[[], nn.Module], benchmark: CLScenario, seed: int, **kwargs: Any
) -> Any:
    """A fresh strategy with the same initial bits every time."""
    if settings.kind in STOCK:
        return make_stock(settings, network, len(benchmark.train_stream), seed, **kwargs)
    torch.manual_seed(seed)
    kind, wrap = OWN[settings.kind]
    options = dict(settings.options)
    model = wrap(network(), **{name: options.pop(name) for name in OF_MODELS if name in options})
    if options.get("isolation") == "planned":
        options["isolation"] = Pools.planned(benchmark)
    options = {name: _object(name, value, settings.kind, seed) for name, value in options.items()}
    if settings.kind in OBEY_NOTHING:  # requests are entered into the ledger, and nothing is unlearned
        options["plugins"] = [TrajectoryPlugin(), UnlearningPlugin(obey=False)]
    return _made(kind, settings, model, options | {"seed": seed} | kwargs)


def _object(name: str, value: Any, kind: str, seed: int) -> Any:
    """Argument of a strategy, from its settings: a mapping, of which ``name`` says the kind where there are several."""
    kinds: dict[str, Maker] = {
        "masks": ScoredWeights if kind == "WSN" else HardAttention,
        "trajectory": TrajectoryPlugin,
        "unlearning": UnlearningPlugin,
    }
    if name in kinds:
        return kinds[name](**value)
    if name not in ("adjustment", "compensation", "repair"):
        return value
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    chosen = given.pop("name")
    if name == "adjustment" and chosen in RULES:
        return RULES[chosen](**given)
    if name == "repair":
        return RepairPlugin(chosen, **given, seed=seed)
    if chosen == "backup":
        return BackupPlugin(**given, seed=seed)
    return ScaledUpdatesPlugin(chosen, **given) if chosen in ("draft", "rate") else value


def make_stock(
    settings: MethodSettings, network: Callable[[], nn.Module], n_tasks: int, seed: int, **kwargs: Any
) -> Any:
    """A fresh strategy of Avalanche's that forgets on request, with norms of each task's own."""
    torch.manual_seed(seed)
    model, options = TaskNormModel(network()), dict(settings.options)
    plugins: list[Any] = [SeedingPlugin(seed), InMemoryLoaderPlugin(), TrajectoryPlugin(), UnlearningPlugin()]
    if settings.kind == "Replay":
        options["mem_size"] = options.pop("memory_per_task", MEMORY) * n_tasks
    elif settings.kind == "DER++":
        plugins.append(DarkReplayPlugin(**({"memory_per_task": MEMORY, "seed": seed} | options)))
        options = {}
    fixed = {"criterion": nn.CrossEntropyLoss(), "plugins": plugins}
    return _made(STOCK[settings.kind], settings, model, fixed | options | kwargs)


def _made(kind: type, settings: MethodSettings, model: nn.Module, options: Mapping[str, Any]) -> Any:
    optimizer = getattr(torch.optim, settings.optimizer)(model.parameters(), lr=settings.lr)
    quiet = {"eval_mb_size": 512, "evaluator": EvaluationPlugin(loggers=[BaseLogger()])}
    return kind(**{"model": model, "optimizer": optimizer} | quiet | dict(options))


def build(cell: Cell, root: str | Path | None = None, download: bool = False) -> tuple[CLScenario, Maker]:
    """The benchmark of a run with its requests, and the maker of its strategies."""
    experiment, method = cell.experiment, cell.experiment.methods[cell.method]
    stream = make_stream(experiment.stream, cell.seed, root, download)
    scenario = make_scenario(experiment.scenarios[cell.scenario], len(stream.train_stream))
    benchmark = scenario.on(stream)
    if method.kind == "CLPU-DER++":  # it trains the tasks that will never be requested in one network
        stays = [e.task_label for e in stream.train_stream if e.task_label not in scenario.requested]
        benchmark = with_unlearning(benchmark, permanent=stays)
    example = stream.train_stream[0].dataset[0][0]
    budget = experiment.training

    def make(**kwargs: Any) -> Any:
        sizes = {"train_mb_size": budget.batch_size, "train_epochs": budget.epochs, "device": budget.device}
        return make_strategy(
            method, lambda: make_network(experiment.network, example), benchmark, cell.seed, **sizes | kwargs
        )

    return benchmark, make
