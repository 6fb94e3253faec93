"""Errors at any line of the package, and all that a strategy knows between tasks as values that compare."""

import copy
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from avalanche.training.plugins import EvaluationPlugin
from torch import Tensor, nn

import avalanche_amnesia
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.unlearning.purging import purger_of

PACKAGE = os.path.dirname(avalanche_amnesia.__file__) + os.sep


class Interrupted(BaseException):
    """No Exception, like what Ctrl-C raises, but one that does not end the test run where a test goes wrong."""


# Errors at lines ---------------------------------------------------------------------------------------------------


@contextmanager
def at_every_line(react: Callable[[str, int], None]) -> Iterator[None]:
    """Call a function with file and line before any line of the package runs; its errors are raised there."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            react(frame.f_code.co_filename, frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(run: Callable[[], object]) -> list[tuple[str, int]]:
    """Every line of the package that a call runs, in order."""
    lines: list[tuple[str, int]] = []
    with at_every_line(lambda file, line: lines.append((file, line))):
        run()
    return lines


@contextmanager
def interrupted_at(number: int) -> Iterator[None]:
    """Raise :class:`Interrupted` in front of the n-th line of the package that runs in this block."""
    left = number

    def count(file: str, line: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise Interrupted(f"in front of {file.removeprefix(PACKAGE)}:{line}")

    with at_every_line(count):
        yield


def first_and_last(lines: list[tuple[str, int]]) -> list[int]:
    """Positions at which each line is run for the first and for the last time."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for position, line in enumerate(lines):
        first.setdefault(line, position)
        last[line] = position
    return sorted({*first.values(), *last.values()})


# A strategy at the end of a training -------------------------------------------------------------------------------


def at_the_end_of(strategy: Any, experience: Any) -> Callable[[], Any]:
    """Train up to the events after the last epoch; return a function that copies the strategy in that state."""

    def stop(**kwargs: Any) -> None:
        raise Interrupted

    strategy._after_training_exp = stop
    with suppress(Interrupted):
        strategy.train(experience)
    del strategy._after_training_exp
    strategy.loss = strategy.mb_output = strategy.mbatch = None
    beside = [experience, strategy.adapted_dataset, strategy.dataloader]

    def copied() -> Any:
        torch.manual_seed(0)  # the host draws from the global streams
        random.seed(0)
        return copy.deepcopy(strategy, {id(thing): thing for thing in beside})

    return copied


def give_up(strategy: Any) -> None:
    """Give up the task in training, as a user does."""
    if hasattr(strategy, "abort_training"):
        strategy.abort_training()
    else:
        find_plugin(strategy, UnlearningPlugin).abort(strategy)


# What there is -----------------------------------------------------------------------------------------------------

# How often something was changed, caches and random streams of the last training, and clock times of records.
NOT_COMPARED = {"generation", "_statistics", "_outside", "_evaluations", "rule", "seconds", "time", "provenance"}
NOT_COMPARED |= {"_directory", "file"}  # every run has its own
NOT_COMPARED |= {"company"}  # an aborted training has seen its data, too


def comparable_state(strategy: Any) -> Any:
    """Everything that a strategy knows of its tasks: its model in order, and the state of its plugins."""
    model = [(name, tensor_hash(value)) for name, value in strategy.model.state_dict().items()]
    with register_all(strategy.model) as every:
        learns = {name: parameter.requires_grad for name, parameter in every.named_parameters()}
    known = [p for p in strategy.plugins if _ours(p) or purger_of(p)]
    own = {type(plugin).__name__: _seen(plugin, set()) for plugin in known if not isinstance(plugin, EvaluationPlugin)}
    masked = {name: getattr(strategy.model, name, None) for name in ("current_task", "masked_tasks")}
    return {"model": model, "learns": learns, "masked": repr(masked), **own}


def _ours(thing: object) -> bool:
    return any(kind.__module__.startswith("avalanche_amnesia") for kind in type(thing).__mro__)


def _seen(value: Any, path: set[int]) -> Any:
    if isinstance(value, Tensor):
        return tensor_hash(value)
    if isinstance(value, nn.Module):
        return {name: tensor_hash(tensor) for name, tensor in value.state_dict().items()}
    if id(value) in path:
        return "itself"
    path = path | {id(value)}
    if isinstance(value, Mapping):
        pairs = [(_seen(key, path), _seen(item, path)) for key, item in value.items()]
        return pairs if not hasattr(value, "repair_of") else [pairs, repr(value.repair_of)]
    if isinstance(value, (list, tuple, deque)):
        return [_seen(item, path) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_seen(item, path)) for item in value)
    if _ours(value) or (hasattr(value, "__dict__") and type(value).__module__.startswith("avalanche.")):
        return {
            name: _seen(item, path)
            for name, item in vars(value).items()
            if name not in NOT_COMPARED and not callable(item)
        }
    return repr(value) if isinstance(value, (str, int, float, bytes, type(None))) else type(value).__name__
