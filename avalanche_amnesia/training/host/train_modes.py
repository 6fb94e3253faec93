"""A strategy's state around an evaluation, put back in time for many tasks."""

from __future__ import annotations

from typing import Any

from avalanche_amnesia.models.modes import modes_of, set_modes


class KeptState:
    """Mixin for a strategy, in front of Avalanche's template: what an evaluation changes, as it was in front of it.

    The host does the same module by module, each time with all modules inside of it: its template walks over all heads
    of all tasks by their names, twice.
    """

    model: Any
    experience: Any
    is_training: bool
    adapted_dataset: Any
    dataloader: Any

    def _save_train_state(self) -> dict[str, Any]:
        names = ("experience", "is_training", "adapted_dataset", "dataloader")
        return {"modes": modes_of(self.model), **{name: getattr(self, name) for name in names}}

    def _load_train_state(self, prev_state: dict[str, Any]) -> None:
        set_modes(prev_state.pop("modes"))
        vars(self).update(prev_state)
