"""Probes: mask, head and norms of a forgotten task, kept by an evaluation to measure how well it was forgotten.

They are residue of the task. They live only in the metrics, never in the model, and are dropped unless the
unlearning allows them (``keep_probes``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from avalanche.evaluation.metric_results import MetricValue
from torch import Tensor, nn

from avalanche_amnesia.evaluation.event_metric import CallbackMetric
from avalanche_amnesia.evaluation.features import features_of, mean_features
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_norm import TaskNormModel
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

ProbeKind = Literal["own", "remaining", "none"]
"""Masks through which a task's data is seen: that of the task, those of the remaining tasks, or none at all."""


@dataclass(frozen=True)
class Probe:
    """A forgotten task's own mask (None for models without), head (None if it had none) and normalisation."""

    mask: Tensor | None
    head: nn.Module | None
    parts: nn.Module | None = None

    def state(self) -> dict[str, Any]:
        """The probe's tensors."""
        head, parts = (None if part is None else dict(part.state_dict()) for part in (self.head, self.parts))
        return {"mask": self.mask, "head": head, "parts": parts}

    @classmethod
    def from_state(cls, state: Any, model: Any) -> Probe:
        """A probe from what :meth:`state` returned, with modules like a model's."""
        mask, head, parts = checked(state, mask=Tensor | None, head=dict | None, parts=dict | None)
        return cls(mask, _module_of(head, model), _module_of(parts, model))


class ProbingMetric(CallbackMetric, ABC):
    """A metric of unlearned tasks: collects their probes, and emits its values after each evaluation between tasks."""

    of_parts = False
    """True: it has values where nothing but samples of remaining tasks was unlearned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: dict[int, Probe] = {}
        self._taken: dict[int, Probe] = {}
        self._loaded: dict[int, Any] = {}

    def state(self) -> dict[int, Any]:
        """State to save: the tensors of the probes."""
        return {task: probe.state() for task, probe in self.probes.items()}

    def load_state(self, state: Any) -> None:
        """Take back what :meth:`state` returned; heads and norms are made once the model is known."""
        self._loaded = dict(state)

    def after_loading(self, strategy: Strategy) -> None:
        """Make heads and norms like those that the model's own tasks have."""
        self.probes = {task: Probe.from_state(held, strategy.model) for task, held in self._loaded.items()}
        self._loaded = {}

    def before_unlearning(self, strategy: Strategy) -> None:
        """Copy the mask and head of the tasks that are about to go, if that is allowed."""
        plugin = unlearning_of(strategy)
        assert plugin.current is not None
        for task in plugin.current.tasks:
            self.probes.pop(task, None)
        self._taken = {task: take_probe(strategy.model, task) for task in plugin.current.tasks if plugin.keeps_probes}

    def after_unlearning(self, strategy: Strategy) -> None:
        """Keep what was taken, now that the tasks are gone."""
        self.probes |= self._taken
        self._taken = {}

    def after_training_exp(self, strategy: Strategy) -> None:
        """A task that is learned again is a new task: the old one's probe goes."""
        self.probes.pop(int(strategy.experience.task_label), None)

    def after_eval(self, strategy: Strategy) -> list[MetricValue] | None:
        """The metric's values; None in the middle of a task, and while nothing has been unlearned."""
        plugin = unlearning_of(strategy)
        gone = plugin.ledger.unlearned or (self.of_parts and plugin.forgotten.hashes)
        if plugin.current_task is not None or not gone:
            return None
        return self.values(strategy, plugin.ledger.unlearned, plugin.ledger.remaining)

    @abstractmethod
    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Values to emit."""

    def probed_features(
        self, model: nn.Module, main: nn.Module, x: Tensor, task: int, remaining: Sequence[int], kind: ProbeKind
    ) -> Tensor | None:
        """Features of a task's inputs; None where there is no mask to look through.

        Args:
            model: the main model, or one to compare it with.
            main: the main model, which says whether there are masks at all.
            x: ``(n, …)``.
            task: an unlearned one, or a remaining one.
            remaining: tasks that both models have.
            kind: ``own``: through the mask that the task had, or has, in the main model; ``remaining``: mean over the
                masks of the remaining tasks; ``none``: all units, or weights, open, and normalisation as it was
                before any task. Models without masks use their plain backbone for all three, but for the norms that
                the task had, of its own, for ``own``.

        Returns:
            ``(n, features)`` on the CPU.
        """
        with_norms = isinstance(main, TaskNormModel) and main.features_per_task
        if kind == "own" and (with_norms or isinstance(main, TaskMaskedModel)):
            probe = take_probe(main, task) if task in remaining else self.probes.get(task)
            if probe is None or (probe.mask is None and probe.parts is None):
                return None
            return features_of(model, x, probe.mask, parts=probe.parts)
        if kind == "none" or not isinstance(main, TaskMaskedModel):
            return features_of(model, x, task=None if with_norms else task)
        assert isinstance(model, TaskMaskedModel)
        return mean_features(model, x, remaining) if remaining else None

    def probed_logits(self, model: nn.Module, x: Tensor, task: int) -> Tensor | None:
        """Logits ``(n, classes)`` of the head that an unlearned task had, on its inputs; None where none was kept.

        Args:
            model: the main model, or one to compare it with.
            x: ``(n, …)``.
            task: an unlearned one.
        """
        probe = self.probes.get(task)
        if probe is None or probe.head is None:
            return None
        features = features_of(model, x, probe.mask, parts=probe.parts, task=task)
        with torch.no_grad():
            logits: Tensor = probe.head.cpu()(features)
        return logits

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drop all probes."""
        self.probes.clear()


def _module_of(tensors: dict[str, Tensor] | None, model: Any) -> nn.Module | None:
    """A module with these tensors, like those that a model's tasks have."""
    if tensors is None:
        return None
    shapes = {name: value.shape for name, value in tensors.items()}
    if shapes.keys() == {"weight", "bias"} and tensors["weight"].dim() == 2:
        weight = tensors["weight"]
        new: nn.Module = nn.utils.skip_init(
            nn.Linear, *reversed(weight.shape), device=weight.device, dtype=weight.dtype
        )
    else:
        alike = [part for task in getattr(model, "tasks", ()) for part in model.task_modules(task)]
        alike += [model.fresh_parts()] if hasattr(model, "fresh_parts") else []
        found = (m for m in alike if {name: value.shape for name, value in m.state_dict().items()} == shapes)
        like = next(found, None)
        if like is None:
            raise ValueError(f"the model has nothing like {sorted(shapes)}, which an unlearned task had")
        new = deepcopy(like)
    new.load_state_dict(tensors)
    return new.eval()


def take_probe(model: nn.Module, task: int) -> Probe:
    """Copies of what a task has of its own: mask, head, norms.

    Args:
        model: any model; of one without masks or heads there is less to copy.
        task: one that it has learned.

    Raises:
        UnknownTaskError: for a task without a head.
    """
    mask = model.binary_mask(task) if isinstance(model, TaskMaskedModel) and task in model.masks else None
    head = deepcopy(model.head(task)) if isinstance(model, MultiHeadModel) else None
    parts = model.task_parts(task) if isinstance(model, TaskMaskedModel) else None
    parts = model.task_norms(task) if isinstance(model, TaskNormModel) else parts
    return Probe(mask, head, deepcopy(parts))


def unlearning_of(strategy: Strategy) -> UnlearningPlugin:
    """The strategy's UnlearningPlugin."""
    plugin = find_plugin(strategy, UnlearningPlugin)
    if plugin is None:
        raise TypeError(
            f"unlearning metrics need an UnlearningPlugin, which {type(strategy).__name__} does not have: use "
            "AmnesiacHAT or WSN, or plugins=[TrajectoryPlugin(), UnlearningPlugin()]"
        )
    return plugin
