"""Errors where a test wants them: in a function, behind it, or at one of the host's events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from avalanche.core import SupervisedPlugin

from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.unlearning import applying

UNLEARNING_STEPS = [
    (Trajectory, "apply"),
    (Trajectory, "remove"),
    (MaskedModel, "remove_task"),
    (TaskLedger, "forget"),
    (TaskLedger, "check"),
    (applying, "remove_task_modules"),
    (applying, "_purge_optimizer"),
    (applying, "state_hashes"),
    (applying, "_replace"),
    (applying, "UnlearningRecord"),
    (applying, "_hold_own"),
]
"""Owner and name of functions that every unlearning calls, from its check to its record."""


class InjectedError(BaseException):
    """Raised where a test wants it; no handler of ``Exception`` catches it."""


def raiser(error: type[BaseException]) -> Callable[..., None]:
    """A function that raises an error of this type, whatever it is called with."""

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
    """Let a function of a module, class or registry raise, in front of its work or behind it."""
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
    """Raises at one of the host's events, at its n-th time."""

    def __init__(self) -> None:
        super().__init__()
        self.event, self.times = "", 0
        for event in ("before_training_exp", "before_forward", "after_update", "after_training_epoch"):
            setattr(self, event, self._at(event))
        for event in ("after_training_exp", "before_unlearning", "after_unlearning"):
            setattr(self, event, self._at(event))

    def _at(self, event: str) -> Callable[..., None]:
        def hear(strategy: Any, **kwargs: Any) -> None:
            if event == self.event:
                self.times -= 1
                if self.times < 0:
                    raise InjectedError(event)

        return hear
