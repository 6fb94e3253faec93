"""A task's own modules besides its head: copies of the backbone's norms and declared modules."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from avalanche_amnesia.unit_graph.task_owned import OwnedSpec, TaskNorm


class OwnModules(nn.ModuleDict):
    """A task's own modules besides its head, by name inside the backbone."""

    learning = True

    @classmethod
    def copied(cls, owned: Mapping[str, OwnedSpec], backbone: nn.Module) -> OwnModules:
        """Copies of everything that tasks have of their own, with the backbone's values."""
        return cls({name.replace(".", "/"): spec.make(backbone) for name, spec in owned.items()})

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(key.replace(".", "/"))  # torch allows no dot in the name of a module

    def train(self, mode: bool = True) -> OwnModules:
        """Training mode only while they learn."""
        super().train(mode and self.learning)
        return self

    def learn(self, learning: bool, mode: bool) -> None:
        """Let their statistics change from now on, or not."""
        self.learning = learning
        self.train(mode)

    def settle(self, fresh: OwnModules, owned: Mapping[str, OwnedSpec], use: Tensor) -> None:
        """End their learning; norms return to their initial values outside the task's mask."""
        self.learn(False, False)
        for name, spec in owned.items():
            mine, template = self[name], fresh[name]
            if isinstance(mine, TaskNorm) and isinstance(template, TaskNorm):
                mine.keep(template, None if spec.sets is None else use[spec.sets.to(use.device)])
