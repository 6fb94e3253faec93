"""Save a strategy between tasks, and load it into a strategy built with the same arguments."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from avalanche.core import BasePlugin
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.utils import trigger_plugins

from avalanche_amnesia import checks
from avalanche_amnesia.audit.signing import as_key, signature_of, verifier_of
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.processes import run_first
from avalanche_amnesia.saving.encoding import decode, encode
from avalanche_amnesia.saving.files import Parts, as_state_error, read_state, write_state
from avalanche_amnesia.saving.strategy_settings import learning_settings
from avalanche_amnesia.saving.values import StateError, checked
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host import states, stock_states  # noqa: F401 - registers them
from avalanche_amnesia.training.host.lookup import UnfinishedLoad, refuse_unfinished, unlearning_of
from avalanche_amnesia.training.host.rollback import Snapshot, is_finishing
from avalanche_amnesia.training.task_in_training import TaskInTraining
from avalanche_amnesia.unlearning.purging.purgers import OF_EVERY_STRATEGY


def save_state(strategy: Strategy, path: str | Path, key: Any = None) -> Path:
    """Save a strategy between tasks: model, masks, heads, recorded updates, ledger (list of tasks), plugins, optimizer.

    The files are safetensors and JSON, so loading runs no code. The state is written completely or not at all. Saving
    into the same directory again replaces the old state and deletes its files. In a process group, the first process
    writes, and the others wait for it.

    Args:
        strategy: a strategy of this package, or of Avalanche if its plugins are known or store plain values.
        path: as in :meth:`TaskStrategy.save`, which also lists the result and the errors.
        key: private key that signs the state, as of :meth:`UnlearningRecord.sign`.
    """
    place, sign = checks.path("path", path), None
    if key is not None:
        sign = partial(signature_of, private_key=as_key(key, "private"))
    body, parts = encoded_state(strategy)
    run_first(lambda: write_state(place, body, parts, sign=sign))
    return place


def encoded_state(strategy: Strategy) -> tuple[dict[str, Any], Parts]:
    """Return a strategy's state between tasks: JSON values, and a dict of the tensors (not copied) for each file."""
    refuse_unfinished(strategy)
    _refuse_in_training(strategy, "save")
    plugins, metrics = _saved_plugins(strategy), _saved_metrics(strategy)
    parts = [strategy, strategy._criterion, *plugins, *metrics]
    held = [states.state_of(part, _unsaved_names(strategy) if part is strategy else frozenset()) for part in parts]
    named = [[_class_name(part), state] for part, state in zip(parts, held, strict=True)][2:]
    state = {
        "strategy": _class_name(strategy),
        "settings": learning_settings(strategy),
        "device": strategy.device.type,
        "model": states.model_state(strategy.model),
        "optimizer": _optimizer_state(strategy),
        "host": held[0],
        "criterion": held[1],
        "plugins": named[: len(plugins)],
        "metrics": named[len(plugins) :],
    }
    try:
        return encode(state)
    except StateError:
        for part, of in zip(parts, held, strict=True):
            states.check_state(part, of)
        raise


def load_state(strategy: Strategy, path: str | Path, key: Any = None) -> None:
    """Load into a strategy a state that :func:`save_state` saved.

    Args:
        strategy: built with the same model, optimizer, plugins and settings. All it has learned is lost. Functions,
            loggers and references that the script set do not change.
        path: the directory.
        key: public key of the state's signer, as of :func:`~avalanche_amnesia.audit.verify`; None: signatures are not
            checked.

    Raises:
        RequestError: in the middle of a task.
        SigningError: if ``key`` is no key, or ``cryptography`` is not installed (extra ``sign``).
        StateError: if there is no state, it is damaged, of another format, or of another strategy; with a key, if it is
            not signed, was changed since, or was signed with another key. The strategy does not change if files are
            damaged or settings differ. If loading a part failed or was interrupted, the strategy refuses to train,
            evaluate, unlearn or be saved until a state is loaded.
    """
    place, check = checks.path("path", path), None if key is None else verifier_of(key)
    load_state_from(strategy, partial(read_state, place, check=check), place)


def load_state_from(strategy: Strategy, read: Callable[[], tuple[Any, Parts]], path: Path) -> None:
    """Load the state that ``read`` returns into a strategy; for the errors see :func:`load_state`."""
    _refuse_in_training(strategy, "load")
    before, mark = strategy.plugins, UnfinishedLoad(path)
    plugins = [plugin for plugin in before if not isinstance(plugin, UnfinishedLoad)]
    strategy.plugins = [mark, *plugins]
    fault = f"{path} has entries that no state of a {type(strategy).__name__} has"
    with as_state_error(path, fault):
        try:
            state = decode(*read(), strategy.device)
            _check_fits(strategy, state, path)
            mine = _saved_plugins(strategy)  # in their saved order; the evaluator keeps its position
            ordered = [mine.pop([_is_a(name, p) for p in mine].index(True)) for name, _ in state["plugins"]]
            plugins = [p if isinstance(p, EvaluationPlugin) else ordered.pop(0) for p in plugins]
            strategy.plugins = [mark, *plugins]
            parts = list(_loading_steps(strategy, state))
            snapshot = Snapshot(strategy, complete=True)
        except Exception:
            strategy.plugins = before  # nothing was changed
            raise
        try:
            for part, give in parts:
                with as_state_error(path, f"{fault}, in {part}"):
                    give()
            trigger_plugins(strategy, "after_loading")
            if (unlearning := unlearning_of(strategy)) is not None:
                unlearning.claims.note_loaded_data(strategy)
        except BaseException:  # the mark stays, because the strategy must not be used with a partial state
            snapshot.restore()
            raise
    strategy.plugins = plugins


def _loading_steps(strategy: Strategy, state: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield, for each part of a strategy, its name and a function that loads its saved state."""
    yield "its model", partial(states.load_model_state, strategy.model, state["model"])
    yield "its optimizer", partial(_load_optimizer, strategy, state["optimizer"])
    yield "the strategy", partial(states.load_state_of, strategy, state["host"], strategy, _unsaved_names(strategy))
    yield "its criterion", partial(states.load_state_of, strategy._criterion, state["criterion"], strategy)
    for plugin, (_, held) in zip(_saved_plugins(strategy), state["plugins"], strict=True):
        yield type(plugin).__name__, partial(states.load_state_of, plugin, held, strategy)
    metrics = _saved_metrics(strategy)
    for name, held in state["metrics"]:
        at = next((at for at, metric in enumerate(metrics) if _is_a(name, metric)), None)
        if at is not None:  # the evaluator may have other metrics now
            yield name, partial(states.load_state_of, metrics.pop(at), held, strategy)


def _refuse_in_training(strategy: Strategy, doing: str) -> None:
    now = [getattr(plugin, "training", None) for plugin in strategy.plugins]
    tasks: set[Any] = {training.task for training in now if isinstance(training, TaskInTraining)}
    tasks |= {getattr(owner, "current_task", None) for owner in (strategy.model, unlearning_of(strategy))} - {None}
    if tasks or is_finishing(strategy):
        task = ", ".join(map(str, tasks))
        raise RequestError(
            f"task {task} is in training, or its training was interrupted: {doing} between tasks, or give it up "
            "first (strategy.abort_training(), or UnlearningPlugin.abort(strategy) of a stock strategy)"
        )


def _check_fits(strategy: Strategy, state: Mapping[str, Any], path: Path) -> None:
    saved, here = state["strategy"], _class_name(strategy)
    if not states.same_class(saved, here):
        raise StateError(f"{path} is the state of a {saved}, not of a {here}")
    if state["device"] == "cpu" and strategy.device.type != "cpu":
        raise StateError(f"{path} was saved on the CPU: load it into a strategy with device='cpu'")
    groups, own = len(state["optimizer"]["names"]), len(strategy.optimizer.param_groups)
    if groups != own:
        raise StateError(f"{path}: the saved optimizer has {groups} parameter groups, and this one has {own}")
    for group, loaded in zip(strategy.optimizer.param_groups, state["optimizer"]["state"]["param_groups"], strict=True):
        for name in (group.keys() & loaded.keys()) - {"params"}:  # optimizers and schedulers may add some later
            mine, value = group[name], loaded[name]
            numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (mine, value))
            if not (isfinite(value) if numbers else type(mine) is type(value)):
                raise StateError(f"invalid value in state at optimizer.{name}: {value!r}, where this one has {mine!r}")
    missing, further = list[str](), _saved_plugins(strategy)
    for name, _ in state["plugins"]:
        fits = [_is_a(name, plugin) for plugin in further]
        further.pop(fits.index(True)) if any(fits) else missing.append(name)
    if missing or further:
        differ = [f"this strategy lacks {', '.join(sorted(missing))}"] if missing else []
        differ += [f"this strategy has {', '.join(sorted(map(_class_name, further)))} besides"] if further else []
        raise StateError(f"{path} was saved with other plugins: {' and '.join(differ)}; build the strategy with these")
    there, ours = dict(_flatten(state["settings"])), dict(_flatten(learning_settings(strategy)))
    if different := [name for name in sorted({*there, *ours}) if there.get(name) != ours.get(name)]:
        listed = ", ".join(f"{name}={there.get(name)!r} (here {ours.get(name)!r})" for name in different)
        raise StateError(f"{path} was saved with other settings: {listed}; build the strategy with those")
    other = states.mismatch(strategy.model, state["model"])
    if other is not None:
        raise StateError(f"{path} holds another model: {other}")


# Parts of a strategy -----------------------------------------------------------------------------------------------


def _class_name(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def _is_a(name: str, obj: Any) -> bool:
    return states.same_class(name, _class_name(obj))


def _flatten(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each entry in nested dicts of settings."""
    if not isinstance(settings, dict):
        yield name, settings
        return
    for key, value in settings.items():
        yield from _flatten(value, f"{name}.{key}".lstrip("."))


def _saved_plugins(strategy: Strategy) -> list[Any]:
    """Return the plugins to save: all but the evaluator (its metrics are saved apart) and the mark of a failed load."""
    return [plugin for plugin in strategy.plugins if not isinstance(plugin, (EvaluationPlugin, UnfinishedLoad))]


def _saved_metrics(strategy: Strategy) -> list[Any]:
    """Return the metrics that have a state to save. Metrics without state start again with every evaluation."""
    return [metric for metric in getattr(strategy.evaluator, "metrics", ()) if states.is_saved(metric)]


_UNSAVED = OF_EVERY_STRATEGY | {
    *("device", "mb_buffer_x", "mb_buffer_y", "mb_buffer_tid", "mb_buffer_out"),
    *("is_training", "_stop_training", "_trains", "eval_mb_size", "eval_every", "peval_mode"),
}
"""Attributes of a strategy not saved as its own: saved elsewhere, or part of one training or evaluation."""


def _unsaved_names(strategy: Strategy) -> frozenset[str]:
    """Return the names of attributes to leave out of a strategy's own state: :data:`_UNSAVED`, and all plugins."""
    return _UNSAVED | {name for name, value in vars(strategy).items() if isinstance(value, BasePlugin)}


# The optimizer -----------------------------------------------------------------------------------------------------


def _optimizer_state(strategy: Strategy) -> dict[str, Any]:
    """Return the optimizer's parameter names and ``state_dict`` (its ``state`` empty if each task resets it)."""
    # Parameters that the model no longer has (the head of an aborted task) are left out.
    names = {id(parameter): name for name, parameter in strategy.model.named_parameters()}
    state, of_groups = strategy.optimizer.state_dict(), []
    for group, saved in zip(strategy.optimizer.param_groups, state["param_groups"], strict=True):
        name_of = {number: names.get(id(p)) for number, p in zip(saved["params"], group["params"], strict=True)}
        kept = {at: held for at, held in state["state"].items() if name_of.get(at, "another's") is not None}
        # The next training would drop it first; until then it would be a trace of the last task.
        state["state"] = {} if getattr(strategy, "reset_optimizer", False) else kept
        saved["params"] = [number for number, name in name_of.items() if name is not None]
        of_groups.append([name for name in name_of.values() if name is not None])
    followed = getattr(strategy, "optimized_param_id", None)
    if followed is not None:
        followed = [name for name, parameter in followed.items() if id(parameter) in names]
    return {"names": of_groups, "state": state, "followed": followed}


def _load_optimizer(strategy: Strategy, state: Any) -> None:
    names, held, followed = checked(state, names=list[list[str]], state=dict, followed=list[str] | None)
    parameters, optimizer = dict(strategy.model.named_parameters()), strategy.optimizer
    of_groups = [[parameters[name] for name in of_group] for of_group in names]
    for group, of_group in zip(optimizer.param_groups, of_groups, strict=True):
        group["params"] = of_group
    optimizer.state.clear()
    given = dict(optimizer.defaults)
    optimizer.load_state_dict(held)
    optimizer.defaults = given  # some torch optimizers add a default, which would count as a changed setting
    strategy.optimized_param_id = None if followed is None else {name: parameters[name] for name in followed}
