"""Errors in front of functions and operations on files, after them, or at one of Avalanche's events."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from avalanche.core import SupervisedPlugin


class InjectedError(BaseException):
    """Raised where a test wants it; no handler of ``Exception`` catches it."""


def raiser(error: type[BaseException]) -> Callable[..., None]:
    """A function that raises an error of this type, with any arguments."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("injected")

    return fail


FILE_OPERATIONS = ((os, "replace"), (os, "fsync"), (Path, "write_bytes"), (Path, "unlink"), (Path, "mkdir"))


@contextmanager
def at_operations(
    act: Callable[[int, bool], None], operations: Sequence[tuple[Any, str]] = FILE_OPERATIONS
) -> Iterator:
    """Call a function around all operations of a block, with their number from 1 and whether it is done.

    Args:
        act: called in front of each operation and behind it; may raise.
        operations: owner and name of the functions that count.
    """
    numbers = itertools.count(1)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        act(number, False)
        result = original(*args, **kwargs)
        act(number, True)
        return result

    with ExitStack() as stack:
        for owner, name in operations:
            original = getattr(owner, name)
            counted = lambda *args, original=original, **kwargs: around(original, *args, **kwargs)  # noqa: E731
            stack.enter_context(patch.object(owner, name, counted))
        yield


@contextmanager
def injected(step: tuple[Any, Any, bool] | None) -> Iterator[None]:
    """Let a function of a module, class or registry raise, before or after its work."""
    if step is None:
        yield
        return
    owner, name, behind = step
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> None:
        if behind:
            original(*args, **kwargs)
        raise InjectedError(name)

    with patch.dict(owner, {name: fails}) if isinstance(owner, dict) else patch.object(owner, name, fails):
        yield


class FailsAtEvent(SupervisedPlugin):
    """Raises at one of the host's events, from its n-th time on; at none while ``event`` is empty.

    Args:
        event: its name, which may be changed later.
        error: type of the error.
        times: how often it lets the event pass before.
        when: whether it counts, by the strategy.
    """

    def __init__(
        self,
        event: str = "",
        error: type[BaseException] = InjectedError,
        *,
        times: int = 0,
        when: Callable[[Any], bool] = lambda strategy: True,
    ) -> None:
        super().__init__()
        self.event, self.error, self.times, self.when = event, error, times, when
        of_tasks = ("before_training_exp", "after_training_exp", "before_unlearning", "after_unlearning")
        of_steps = ("before_forward", "after_backward", "after_update", "after_training_iteration")
        for known in (*of_tasks, *of_steps, "after_training_epoch"):
            setattr(self, known, self._at(known))

    def _at(self, event: str) -> Callable[..., None]:
        def hear(strategy: Any, **kwargs: Any) -> None:
            if event == self.event and self.when(strategy):
                if self.times == 0:
                    raise self.error(f"injected at {event}")
                self.times -= 1

        return hear


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))
