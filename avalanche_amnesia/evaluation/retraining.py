"""Training of one strategy on several sequences of tasks; their common beginnings are trained only once."""

import tempfile
import warnings
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from avalanche_amnesia.saving.files import read_state, write_state
from avalanche_amnesia.saving.values import StateError
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.saving import encoded_state, load_state_from


class Retraining:
    """Run that trains a strategy on sequences of tasks; it saves the state after each, to reuse common beginnings."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._folder = tempfile.TemporaryDirectory(prefix="amnesia-references-", ignore_cleanup_errors=True)
        self._tensors = Path(self._folder.name) / "tensors"  # folder of tensor files, shared by all states
        self._tensors.mkdir()
        self._seconds: dict[tuple[int, ...], float] = {}
        self._held: tuple[int, ...] | None = ()
        self.trained: tuple[int, ...] = ()
        self.computed = 0
        self.stored = True
        self._save(())

    @property
    def strategy(self) -> Any:
        """Return the strategy as it was after training the tasks in ``self.trained``; load that state if necessary."""
        if self._held != self.trained:
            self._held = None  # if the loading is interrupted, the strategy has no valid state
            place = self._state_path(self.trained)
            load_state_from(self._strategy, partial(read_state, place, self._tensors), place)
            self._held = self.trained
        return self._strategy

    def train(self, experience: Any, **options: Any) -> None:
        """Add the experience's task to ``trained``, and train the task unless this sequence was trained before."""
        path = (*self.trained, int(experience.task_label))
        if path not in self._seconds:
            strategy, started = self.strategy, perf_counter()
            self._held = None  # if the training is interrupted, the strategy has no valid state
            strategy.train(experience, **options)
            self._held, self._seconds[path] = path, perf_counter() - started
            self.computed += 1
            self._save(path)
        self.trained = path

    def restart(self) -> None:
        """Restore the strategy's initial state: no task is trained."""
        self.trained = ()

    def seconds(self) -> float:
        """Return the seconds of training the last task in ``trained``."""
        return self._seconds[self.trained]

    def _save(self, path: tuple[int, ...]) -> None:
        if not self.stored:  # the warning is given once
            return
        try:
            write_state(self._state_path(path), *encoded_state(self._strategy), self._tensors)
        except StateError as error:
            self.stored = False
            warnings.warn(f"the states of this run are not stored: {error}", stacklevel=6)

    def _state_path(self, path: tuple[int, ...]) -> Path:
        return Path(self._folder.name) / "-".join(map(str, ("state", *path)))
