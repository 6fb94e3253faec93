"""Build streams, networks and strategies from settings."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
from avalanche.benchmarks import CLScenario
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import EWC, LwF, Naive, Replay
from avalanche.training.templates import SupervisedTemplate
from torch import nn

from avalanche_amnesia import benchmarks, checks, training
from avalanche_amnesia.benchmarks.requests import with_unlearning
from avalanche_amnesia.checks import known_options
from avalanche_amnesia.contrib import streams
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, RanPAC
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.contrib.streams import scenarios
from avalanche_amnesia.contrib.streams.conv_nets import cifar_resnet18
from avalanche_amnesia.contrib.streams.image_sets import ENVIRONMENT
from avalanche_amnesia.contrib.streams.scenarios import Scenario
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.lab.study import settings as kinds
from avalanche_amnesia.models import MLP, MultiHeadModel, TaskNormModel
from avalanche_amnesia.optimizers import check_optimizer
from avalanche_amnesia.saving.typed import to_type
from avalanche_amnesia.training.update_rules import RULES

OWN: dict[str, type] = {
    "AmnesiacHAT": training.AmnesiacHAT,
    "HAT": training.HAT,
    "AdaHAT": training.AdaHAT,
    "DisjointSubnets": training.DisjointSubnets,
    "WSN": training.WSN,
    "PALL": PALL,
    "CLPU-DER++": CLPUDERpp,
    "Independent": Independent,
    "RanPAC": RanPAC,
}
"""Kind of method → strategy class of this package."""
STOCK: dict[str, type] = {"Naive": Naive, "EWC": EWC, "LwF": LwF, "Replay": Replay, "DER++": Naive}
"""Kind of method → strategy class of Avalanche; two plugins add unlearning."""
MEMORY = 50
"""Number of samples per task that DER++ keeps; Replay multiplies it by the number of tasks and shares the memory."""
DEFAULTS: dict[str, dict[str, Any]] = {"EWC": {"ewc_lambda": 1e4}, "LwF": {"alpha": 1.0, "temperature": 2.0}}
"""Default options where Avalanche's strategies have none."""
GIVEN = {"model", "backbone", "optimizer", "seed", "train_epochs", "train_mb_size", "device"}
GIVEN |= {"criterion", "plugins", "evaluator", "eval_every", "peval_mode"}
"""Arguments of strategies that are no options of a method: other settings, or the lab, give them."""
Maker = Callable[..., Any]
PARTS: dict[str, Mapping[str, Maker]] = {
    "adjustment": RULES,
    "compensation": {"backup": BackupPlugin, "counterfactual": lambda: "counterfactual", "none": lambda: "none"},
    "repair": {"joint": RepairPlugin},
}
"""Option of a strategy that takes an object → name in the settings → function that makes the object."""


def make_stream(settings: kinds.StreamSettings, seed: int, root: str | Path | None = None) -> CLScenario:
    """Build the benchmark of an experiment, without unlearning requests."""
    sizes = {"n_train": settings.n_train, "n_test": settings.n_test}
    given = {name: value for name, value in sizes.items() if value is not None} | settings.options
    offered = {"n_tasks": settings.n_tasks, "seed": seed, "root": root or os.environ.get(ENVIRONMENT)}
    stream: CLScenario = _call(get_maker(settings.name, "stream.name"), given, offered, settings.name)
    if not hasattr(stream, "train_stream"):
        raise TypeError(f"{settings.name} returned {stream!r}, no benchmark: return what task_benchmark returns")
    if len(stream.train_stream) != settings.n_tasks:
        n = len(stream.train_stream)
        raise ValueError(f"stream.n_tasks={settings.n_tasks}, but {settings.name} has {n}: say stream.n_tasks={n}")
    return stream


def get_maker(name: str, path: str) -> Any:
    """Return the built-in or imported function or class ``name`` for a stream or network; errors name ``path``."""
    if ":" in name:
        return kinds.find_named(name, path)
    ours = {"MLP": _make_mlp, "ResNet18": cifar_resnet18}
    return ours[name] if name in ours else getattr(benchmarks if hasattr(benchmarks, name) else streams, name)


def _call(make: Maker, given: Mapping[str, Any], offered: Mapping[str, Any], owner: str) -> Any:
    """Call a function with all arguments in ``given``, and with the arguments in ``offered`` that it accepts."""
    takes = inspect.signature(make).parameters
    rest = [parameter for parameter in takes.values() if parameter.kind is parameter.VAR_KEYWORD]
    dicts = [kind for parameter in rest for kind in get_args(parameter.annotation)]  # **options: Unpack[ImageOptions]
    listed = [name for kind in dicts for name in getattr(kind, "__annotations__", ())]
    if listed or not rest:
        known_options(given, [*takes, *listed], owner)
    return make(**{name: value for name, value in offered.items() if name in [*takes, *listed]} | dict(given))


def make_scenario(settings: kinds.ScenarioSettings, n_tasks: int) -> Scenario:
    """Build an experiment's scenario: its schedule of requests to unlearn."""
    make = kinds.find_named(settings.name, "scenario", {name: getattr(scenarios, name) for name in kinds.SCENARIOS})
    known_options(settings.options, [*inspect.signature(make).parameters][1:], f"scenario {settings.name}")
    scenario: Scenario = make(n_tasks, **settings.options)
    return scenario


def make_network(settings: kinds.NetworkSettings, example: torch.Tensor) -> nn.Module:
    """Build a feature extractor with weights from torch's global generator; set ``features`` to its output width."""
    offered = {"shape": tuple(example.shape), "widths": settings.widths}
    network: nn.Module = _call(get_maker(settings.name, "network.name"), settings.options, offered, settings.name)
    if not isinstance(network, nn.Module):
        raise TypeError(f"{settings.name} returned {network!r}, no network: return a torch.nn.Module")
    if checks.integer(getattr(network, "features", None)) is None:
        try:
            with torch.no_grad():
                width = network.eval()(example[None]).shape[1]
        except (RuntimeError, ValueError) as error:
            inputs = f"{tuple(example.shape)}, {example.dtype}"
            raise ValueError(f"{settings.name} can't take the stream's inputs of shape {inputs}: {error}") from error
        if hasattr(network, "features"):  # many networks have layers of this name
            network = nn.Sequential(network)
        network.features = width
        network.train()
    return network


def _make_mlp(shape: tuple[int, ...], widths: list[int]) -> nn.Module:
    if not widths:
        raise ValueError("network.widths must have one width at least, that of the features; got []")
    return MLP(prod(shape), hidden=widths[:-1], features=widths[-1])


def strategy_class(settings: kinds.MethodSettings) -> type:
    """Return the strategy class of a method: this package's, Avalanche's or the user's."""
    kind = kinds.find_named(settings.kind, "methods: kind", OWN | STOCK)
    if not (isinstance(kind, type) and issubclass(kind, SupervisedTemplate)):
        raise ValueError(f"methods: kind {settings.kind} is {kind!r}: name a class of strategies, as in MODULE:HAT")
    return kind


def optimizer_class(settings: kinds.MethodSettings) -> type:
    """Return the optimizer class of a method."""
    there = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and c is not torch.optim.Optimizer}
    kind: type = kinds.find_named(settings.optimizer, "methods: optimizer", there)
    return kind


def model_class(kind: type) -> type:
    """Return the model class of a strategy, from the annotation of its argument ``model``."""
    annotation = _argument_types(kind).get("model")
    if isinstance(annotation, type) and issubclass(annotation, MultiHeadModel) and annotation is not MultiHeadModel:
        return annotation
    if issubclass(kind, training.TaskStrategy):
        raise ValueError(f"{kind.__name__} has no model of a known class: annotate its argument model: MaskedModel")
    return TaskNormModel


def make_strategy(
    settings: kinds.MethodSettings, network: Callable[[], nn.Module], benchmark: CLScenario, seed: int, **kwargs: Any
) -> Any:
    """Build a new strategy of a method; every call with equal arguments gives the same initial weights, bit for bit."""
    kind = strategy_class(settings)
    check_options(settings)
    if not issubclass(kind, training.TaskStrategy):
        return make_stock(settings, network, len(benchmark.train_stream), seed, **kwargs)
    model, options = _make_model(kind, network, seed, settings.options)
    if isinstance(options.get("isolation"), str):
        checks.one_of("options.isolation", options["isolation"], Literal["planned"])
        options |= {"isolation": Pools.planned(benchmark)}
    options = {name: _make_object(name, value, kind, seed) for name, value in options.items()}
    if settings.kind in kinds.OBEY_NOTHING:  # record requests without unlearning
        options["plugins"] = [training.TrajectoryPlugin(), training.UnlearningPlugin(obey=False)]
    fixed = {"seed": seed} | ({"train_epochs": 1} if kind is RanPAC else {})  # a second pass would add samples again
    return _make_strategy(kind, settings, model, options | kwargs | fixed)


def check_options(settings: kinds.MethodSettings) -> None:
    """Raise an error for an unknown option of a method, or an option with a value of the wrong type."""
    kind = strategy_class(settings)
    if settings.kind == "DER++":  # its plugin checks the options
        return
    takes = _argument_types(kind) | _argument_types(model_class(kind))
    if settings.kind == "Replay":
        takes["memory_per_task"] = takes.pop("mem_size")
    known_options(settings.options, takes.keys() - GIVEN, settings.kind)
    for name, value in settings.options.items():
        given = _make_object(name, value, kind, seed=0) if issubclass(kind, training.TaskStrategy) else value
        if name != "isolation":  # "planned" stands for an object, which needs the benchmark
            to_type(takes.get(name, Any), given, f"options.{name} of {settings.kind}")


def _argument_types(kind: type) -> dict[str, Any]:
    """Return types, by name, of a class's ``__init__`` arguments, including those it passes to its base classes."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if (init := vars(base).get("__init__")) is None:
            continue
        takes = inspect.signature(init).parameters.values()
        try:
            hints = get_type_hints(init)
        except NameError as error:
            raise ValueError(f"{kind.__name__}: the types of its arguments can't be read ({error})") from error
        for each in takes:
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                hint = hints.get(each.name, Any)
                found.setdefault(each.name, hint if each.default is not None else hint | None)
        if not any(p.kind is p.VAR_KEYWORD for p in takes):
            break
    return {name: of for name, of in found.items() if name != "self"}


def _make_model(
    kind: type, network: Callable[[], nn.Module], seed: int, options: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a method's model with the options that only the model accepts; return (model, all other options)."""
    torch.manual_seed(seed)
    wrap = model_class(kind)
    its = inspect.signature(wrap).parameters.keys() - inspect.signature(kind).parameters.keys()
    model = wrap(network(), **{name: value for name, value in options.items() if name in its})
    return model, {name: value for name, value in options.items() if name not in its}


def _make_object(name: str, value: Any, kind: type, seed: int) -> Any:
    """Return a strategy's argument for a setting: the value itself, or an object built from the nested settings."""
    masks = training.ScoredWeights if issubclass(kind, training.WSN) else training.HardAttention
    classes: dict[str, Maker] = {
        "masks": masks,
        "trajectory": training.TrajectoryPlugin,
        "unlearning": training.UnlearningPlugin,
    }
    place = f"options.{name}"
    if name in classes and isinstance(value, Mapping):
        return _call(classes[name], value, {}, place)
    if name not in PARTS:
        return value
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    return _call(kinds.find_named(str(given.pop("name", "")), place, PARTS[name]), given, {"seed": seed}, place)


def make_stock(
    settings: kinds.MethodSettings, network: Callable[[], nn.Module], n_tasks: int, seed: int, **kwargs: Any
) -> Any:
    """Build a new strategy of Avalanche with the unlearning plugins and a copy of the model's norm layers per task."""
    kind = strategy_class(settings)
    model, options = _make_model(kind, network, seed, DEFAULTS.get(settings.kind, {}) | settings.options)
    plugins: list[Any] = [
        training.SeedingPlugin(seed),
        training.InMemoryLoaderPlugin(),
        training.TrajectoryPlugin(),
        training.UnlearningPlugin(),
    ]
    if settings.kind == "Replay":
        per_task = checks.whole_number("options.memory_per_task", options.pop("memory_per_task", MEMORY))
        options["mem_size"] = per_task * n_tasks
    elif settings.kind == "DER++":
        plugins.append(_call(DarkReplayPlugin, options, {"memory_per_task": MEMORY, "seed": seed}, "DER++"))
        options = {}
    fixed = {"criterion": nn.CrossEntropyLoss(), "plugins": plugins}
    return _make_strategy(kind, settings, model, fixed | options | kwargs)


def _make_strategy(kind: type, settings: kinds.MethodSettings, model: nn.Module, options: Mapping[str, Any]) -> Any:
    optimizer = optimizer_class(settings)(model.parameters(), lr=settings.lr)
    check_optimizer(optimizer, model.parameters())
    quiet = {"eval_mb_size": 512, "evaluator": EvaluationPlugin(loggers=[BaseLogger()])}
    given = {"model": model, "optimizer": optimizer} | quiet | dict(options)
    if "optimizer" in getattr(kind, "composed", ()):  # it has none
        del given["optimizer"]
    return kind(**given)


def check_names(cells: Iterable[kinds.Cell]) -> None:
    """Raise an error for an unknown name in the settings of any run, so that no run starts with unknown names."""
    for cell in cells:
        experiment, method = cell.experiment, cell.experiment.methods[cell.method]
        check_options(method)
        optimizer_class(method)
        get_maker(experiment.stream.name, "stream.name")
        get_maker(experiment.network.name, "network.name")
        make_scenario(experiment.scenarios[cell.scenario], experiment.stream.n_tasks)


def build(cell: kinds.Cell, root: str | Path | None = None) -> tuple[CLScenario, Maker]:
    """Build a run's benchmark, with its requests to unlearn, and return it and a function that builds strategies."""
    experiment, method = cell.experiment, cell.experiment.methods[cell.method]
    if experiment.training.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device=cuda: torch finds no GPU here; say training.device=cpu")
    stream = make_stream(experiment.stream, cell.seed, root)
    scenario = make_scenario(experiment.scenarios[cell.scenario], len(stream.train_stream))
    benchmark = scenario.on(stream)
    if method.kind == "CLPU-DER++":  # tasks without a request share one network
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
