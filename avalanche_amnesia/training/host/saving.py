"""State of a strategy between tasks, saved and given back to one that was built alike."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from avalanche.benchmarks import CLExperience, CLScenario, CLStream
from avalanche.core import BasePlugin
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.storage_policy import ReservoirSamplingBuffer, _ParametricSingleBuffer
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import ParamData
from torch import Tensor, nn

from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving.classes import name_of, saveable
from avalanche_amnesia.saving.encoding import Decoder, Encoder, attributes_of, load_module_numbers, module_numbers
from avalanche_amnesia.saving.files import StateError, read_state, write_state
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.rollback import is_finishing
from avalanche_amnesia.training.host.saved_data import REPLAYED
from avalanche_amnesia.training.task_in_training import TaskInTraining

for _of_the_host in (ParamData, ReservoirSamplingBuffer, _ParametricSingleBuffer):
    saveable(_of_the_host)

_OF_BENCHMARKS = (CLScenario, CLStream, CLExperience)
"""Classes of what holds every task's samples: metrics and plugins that keep some are given it by their script."""
_PLAIN = (bool, int, float, str, type(None))
_OF_EVALUATION = frozenset({"eval_mb_size", "eval_every", "peval_mode"})


def save_state(strategy: Any, path: str | Path) -> Path:
    """Save a strategy between tasks: model, masks, heads, trajectory, ledger, what its plugins keep, the optimizer.

    As safetensors and JSON: loading runs no code. Written as a whole or not at all; saving into the same directory
    again replaces the old state, and deletes what it alone held.

    Args:
        strategy: this package's, or any of Avalanche's whose plugins are known or hold plain values.
        path: a directory, made if it does not exist.

    Returns:
        The directory.

    Raises:
        RequestError: in the middle of a task: abort it, or save before it or after.
        StateError: if a plugin holds something that can't be saved, or the directory something else.
        OSError: if it can't be written; a state that was there stays.
    """
    path = Path(path)
    body, tensors = encoded_state(strategy)
    write_state(path, body, tensors)
    return path


def encoded_state(strategy: Any) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """State of a strategy between tasks: plain values, and groups of tensors by name, which are its own."""
    _refuse_in_training(strategy, "save")
    encoder = Encoder(_known(strategy), [REPLAYED], given=_OF_BENCHMARKS)
    body = {
        "strategy": name_of(type(strategy)),
        "settings": _settings_of(strategy),
        "device": strategy.device.type,
        "model": _encoded_model(strategy.model, encoder),
        "criterion": encoder.encode(_own(strategy._criterion), "criterion"),
        "optimizer": _encoded_optimizer(strategy, encoder),
        "host": {name: encoder.encode(value, name) for name, value in _host_attributes(strategy).items()},
        "plugins": [[name_of(type(p)), encoder.encode(p, type(p).__name__)] for p in _plugins(strategy)],
        "metrics": [[name_of(type(m)), encoder.encode(m, type(m).__name__)] for m in _metrics(strategy)],
    }
    return body, encoder.tensors


def load_state(strategy: Any, path: str | Path) -> None:
    """Give a strategy the state that :func:`save_state` saved.

    Args:
        strategy: built as the saved one was, with the same model, optimizer, plugins and settings; what it has learned
            since is lost, and what a script gives (functions, loggers, an evaluator's references) stays its own.
        path: the directory.

    Raises:
        RequestError: in the middle of a task.
        StateError: if there is no state, it is damaged, of another format, or of another strategy. Nothing was changed
            where files are damaged or settings differ; else build the strategy anew.
    """
    give_state(strategy, *read_state(Path(path)), Path(path))


def give_state(strategy: Any, body: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Give a strategy a state that was read; as :func:`load_state`."""
    try:
        _check_fits(strategy, body, path)
        _give(strategy, body, tensors, path)
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # whatever somebody else has put into it
        raise StateError(f"{path} holds what no state of a {type(strategy).__name__} holds: {error!r}") from error


def _give(strategy: Any, body: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    model = strategy.model
    early = Decoder(tensors, {}, device=strategy.device)
    _load_model(model, body["model"], early, path)
    strategy.plugins = _in_saved_order(strategy, [name for name, _ in body["plugins"]])
    decoder = Decoder(tensors, _known(strategy), lambda: _templates(model), strategy.device, [REPLAYED])
    _load_optimizer(strategy, body["optimizer"], decoder)
    for name, code in body["host"].items():
        setattr(strategy, name, decoder.decode(code, getattr(strategy, name, None), name))
    criterion = decoder.decode(body["criterion"], _own(strategy._criterion), "criterion")
    vars(strategy._criterion).update(criterion)
    for plugin, (name, code) in zip(_plugins(strategy), body["plugins"], strict=True):
        decoder.decode(code, plugin, name.rpartition(".")[2])
    for metric, (name, code) in zip(_metrics(strategy), body["metrics"], strict=False):
        if name_of(type(metric)) == name:  # others may be looked at by now
            decoder.decode(code, metric, name.rpartition(".")[2])


def saved_tensors(path: str | Path) -> dict[str, Tensor]:
    """Tensors of the model in a saved state, by the names of ``model.state_dict()``."""
    body, tensors = read_state(Path(path))
    decoder = Decoder(tensors, {})
    return {name: decoder.decode(code, None, name) for name, code in body["model"]["state"].items()}


def _refuse_in_training(strategy: Any, doing: str) -> None:
    now = [getattr(plugin, "training", None) for plugin in strategy.plugins]
    tasks: set[Any] = {training.task for training in now if isinstance(training, TaskInTraining)}
    tasks |= {getattr(owner, "current_task", None) for owner in (strategy.model, unlearning_of(strategy))} - {None}
    if tasks or is_finishing(strategy):
        task = ", ".join(map(str, tasks))
        raise RequestError(
            f"task {task} is in training, or its training was interrupted: {doing} between tasks, or give it up "
            "first (strategy.abort_training(), or UnlearningPlugin.abort(strategy) of a stock strategy)"
        )


def differing_parts(body: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a state in which two strategies differ that learn differently: without metrics and evaluations."""
    host = {name: value for name, value in body["host"].items() if name not in _OF_EVALUATION}
    plugins = [plugin for plugin in body["plugins"] if plugin[0] != name_of(PeriodicEval)]
    return {**body, "host": host, "plugins": plugins, "metrics": []}


def _check_fits(strategy: Any, body: Mapping[str, Any], path: Path) -> None:
    saved, here = body["strategy"], name_of(type(strategy))
    if saved != here:
        raise StateError(f"{path} is the state of a {saved}, not of a {here}")
    if body["device"] == "cpu" and strategy.device.type != "cpu":
        raise StateError(f"{path} was saved on the CPU: load it into a strategy with device='cpu'")
    _refuse_in_training(strategy, "load")
    groups, own = len(body["optimizer"]["groups"]), len(strategy.optimizer.param_groups)
    if groups != own:
        raise StateError(f"{path}: the saved optimizer has {groups} parameter groups, and this one has {own}")
    plugins = sorted(name for name, _ in body["plugins"])
    mine = sorted(name_of(type(plugin)) for plugin in _plugins(strategy))
    if plugins != mine:
        missing = ", ".join((Counter(plugins) - Counter(mine)).elements())
        further = ", ".join((Counter(mine) - Counter(plugins)).elements())
        differ = [f"this strategy lacks {missing}"] if missing else []
        differ += [f"this strategy has {further} besides"] if further else []
        raise StateError(
            f"{path} was saved beside other plugins: {' and '.join(differ)}; build the strategy with the same ones"
        )
    settings = _settings_of(strategy)
    different = {
        name: (body["settings"].get(name), settings.get(name))
        for name in sorted({*settings, *body["settings"]})
        if body["settings"].get(name) != settings.get(name)
    }
    if different:
        listed = ", ".join(f"{name}={old!r} (here {new!r})" for name, (old, new) in different.items())
        raise StateError(f"{path} was saved with other settings: {listed}; build the strategy with those")


# Settings ----------------------------------------------------------------------------------------------------------


def _settings_of(strategy: Any) -> dict[str, Any]:
    """Plain settings of a strategy, its optimizer and its plugins: attributes that carry a constructor's argument."""
    result = dict(_settings("", strategy))
    for plugin in _plugins(strategy):
        result |= dict(_settings(f"{type(plugin).__name__}.", plugin))
    name = type(strategy.optimizer).__name__
    result["optimizer"] = name
    defaults = strategy.optimizer.defaults.items()
    result |= {f"{name}.{key}": _comparable(value) for key, value in defaults if _is_plain(value)}
    return result


def _settings(prefix: str, thing: Any) -> Iterator[tuple[str, Any]]:
    names = {name for kind in type(thing).__mro__ for name in _parameters(kind)}
    for name, value in vars(thing).items():
        if name not in names or name in _OF_EVALUATION:
            continue
        if _is_plain(value):
            yield f"{prefix}{name}", _comparable(value)
        elif type(value).__module__.startswith("avalanche_amnesia.") and not isinstance(value, (nn.Module, BasePlugin)):
            yield f"{prefix}{name}", type(value).__name__
            yield from _settings(f"{prefix}{name}.", value)


@lru_cache(512)
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.__init__).parameters)


def _comparable(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if isinstance(value, Mapping):
        return [list(pair) for pair in value.items()]
    return list(value) if isinstance(value, tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = (*value.keys(), *value.values())
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))


# Parts of a strategy -----------------------------------------------------------------------------------------------


def _known(strategy: Any) -> dict[str, object]:
    """Objects that a strategy built alike has as well, by name."""
    known: dict[str, object] = {"strategy": strategy, "model": strategy.model, "optimizer": strategy.optimizer}
    known |= {"evaluator": strategy.evaluator, "criterion": strategy._criterion}
    known |= {f"torch.{function.__name__}": function for function in (torch.zeros, torch.ones)}
    known |= {f"parameter {name}": value for name, value in strategy.model.named_parameters()}
    graph = getattr(strategy.model, "graph", None)
    known |= {name: thing for name, thing in (("graph", graph), ("sets", getattr(graph, "sets", None))) if thing}
    return known


def _plugins(strategy: Any) -> list[Any]:
    """Plugins but the evaluator: its loggers are the script's, its metrics are saved by themselves."""
    return [plugin for plugin in strategy.plugins if not isinstance(plugin, EvaluationPlugin)]


def _metrics(strategy: Any) -> list[Any]:
    """This package's metrics; the host's begin anew with every evaluation, or hold the run's own numbers."""
    metrics = getattr(strategy.evaluator, "metrics", ())
    return [metric for metric in metrics if type(metric).__module__.startswith("avalanche_amnesia.")]


def _in_saved_order(strategy: Any, names: list[str]) -> list[Any]:
    """Plugins in the order of the saved ones; the evaluator, which is none of them, keeps its place."""
    mine = _plugins(strategy)
    ordered = []
    for name in names:
        plugin = next(p for p in mine if name_of(type(p)) == name)
        mine.remove(plugin)
        ordered.append(plugin)
    return [p if isinstance(p, EvaluationPlugin) else ordered.pop(0) for p in strategy.plugins]


_NOT_KEPT = frozenset(
    {
        *{"model", "optimizer", "plugins", "evaluator", "_criterion", "device", "clock"},  # saved by themselves
        *{"experience", "current_eval_stream", "mbatch", "adapted_dataset", "dataloader", "mb_output", "loss"},
        *{"_eval_streams", "_listeners", "rollback_point", "is_training", "_stop_training", "_trains"},
    }
)
"""Attributes of a strategy that its state has elsewhere, or that belong to one training or evaluation."""


def _host_attributes(strategy: Any) -> dict[str, Any]:
    """Attributes that the strategy itself keeps over its tasks."""
    return {name: value for name, value in vars(strategy).items() if name not in _NOT_KEPT}


def _own(criterion: Any) -> dict[str, Any]:
    """Attributes of a criterion, without those of every module that say nothing."""
    held = attributes_of(criterion) or {}
    return {
        name: value for name, value in held.items() if not name.startswith("_") or name in ("_buffers", "_parameters")
    }


# The model ---------------------------------------------------------------------------------------------------------


def _encoded_model(model: nn.Module, encoder: Encoder) -> dict[str, Any]:
    state = {name: encoder.encode(value.detach(), name) for name, value in model.state_dict().items()}
    kinds = dict(_kinds(model))
    return {"state": state, "kinds": kinds, "numbers": dict(module_numbers(model))}


def _kinds(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Classes of the model and of the modules in its backbone, by path; tasks' own modules are made as they come."""
    yield "", name_of(type(model))
    for path, module in model.named_modules():
        if path.split(".")[0] == "backbone":
            yield path, name_of(type(module))


def _load_model(model: nn.Module, code: Mapping[str, Any], decoder: Decoder, path: Path) -> None:
    kinds = dict(_kinds(model))
    other = sorted(name for name in {*kinds, *code["kinds"]} if code["kinds"].get(name) != kinds.get(name))
    if other:
        there, here = code["kinds"].get(other[0]), kinds.get(other[0])
        raise StateError(f"{path} holds another model: {other[0] or 'it'} is a {there} there, and a {here} here")
    state: dict[str, Tensor] = {name: decoder.decode(value, None, name) for name, value in code["state"].items()}
    for name, value in model.named_parameters():
        if name in state and value.shape != state[name].shape:
            raise StateError(
                f"{path} holds another model: {name} has shape {tuple(state[name].shape)} there, and "
                f"{tuple(value.shape)} here"
            )
        if name in state and value.dtype != state[name].dtype:
            raise StateError(f"{path}: {name} is {state[name].dtype} there, and {value.dtype} here")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise StateError(f"{path} holds another model: {error}") from error
    load_module_numbers(model, code["numbers"], str(path))


def _templates(model: Any) -> Iterator[nn.Module]:
    """Modules like those that plugins and metrics keep copies of: the model, a head, what tasks have of their own."""
    yield model
    for task in model.tasks:
        yield from model.task_modules(task)


# The optimizer -----------------------------------------------------------------------------------------------------


def _encoded_optimizer(strategy: Any, encoder: Encoder) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in strategy.model.named_parameters()}
    optimizer = strategy.optimizer
    groups = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append([[names[id(p)] for p in group["params"] if id(p) in names], encoder.encode(options, "optimizer")])
    state = {names[id(p)]: held for p, held in optimizer.state.items() if id(p) in names}
    return {"groups": groups, "state": encoder.encode(state, "optimizer.state")}


def _load_optimizer(strategy: Any, code: Mapping[str, Any], decoder: Decoder) -> None:
    parameters = dict(strategy.model.named_parameters())
    optimizer = strategy.optimizer
    for group, (names, options) in zip(optimizer.param_groups, code["groups"], strict=True):
        group["params"] = [parameters[name] for name in names]
        group.update(decoder.decode(options, None, "optimizer"))
    optimizer.state.clear()
    for name, held in decoder.decode(code["state"], None, "optimizer.state").items():
        optimizer.state[parameters[name]] = held
