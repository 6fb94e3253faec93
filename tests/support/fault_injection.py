"""Errors in front of a function, after it, or at one of Avalanche's events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def after_call(original: Callable[..., Any], error: type[BaseException]) -> Callable[..., None]:
    """A function that does what another one does, and then raises an error of this type."""

    def fail(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise error("injected behind")

    return fail


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
        for known in ("before_training_exp", "before_forward", "after_backward", "after_update"):
            setattr(self, known, self._at(known))
        for known in ("after_training_iteration", "after_training_epoch", "after_training_exp"):
            setattr(self, known, self._at(known))
        for known in ("before_unlearning", "after_unlearning"):
            setattr(self, known, self._at(known))

    def _at(self, event: str) -> Callable[..., None]:
        def hear(strategy: Any, **kwargs: Any) -> None:
            if event == self.event and self.when(strategy):
                if self.times == 0:
                    raise self.error(f"injected at {event}")
                self.times -= 1

        return hear
