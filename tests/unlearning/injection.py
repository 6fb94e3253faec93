"""Errors where a test wants them: in a function, or at one of the host's events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from avalanche.core import SupervisedPlugin


class InjectedError(BaseException):
    """Raised where a test wants it; no handler of ``Exception`` catches it."""


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


class Breaks(SupervisedPlugin):
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
