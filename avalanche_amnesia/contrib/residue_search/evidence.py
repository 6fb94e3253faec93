"""Evidence: copies of what tasks put into a model, taken before they are unlearned, for an audit right afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.audit.record import Fingerprint, Kind, Sketch, Trace
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.residue_search.sketches import pattern_hash, sketch, telling, values_hash
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.unlearning.context import UnlearningContext


@dataclass(frozen=True)
class Evidence:
    """Copies of what tasks put into a model. They *are* residue: keep them outside the strategy.

    Attributes:
        tasks: the tasks.
        own: name → tensor that belongs only to the tasks (heads, embeddings, normalisation).
        masks: name → bool tensor of the units, or weights, that a task's mask opens; whole, and by layer.
        before: shared tensor → values with the tasks.
        after: shared tensor → values without them.
        samples: inputs of the tasks, ``(n, …)``; None: not looked for.
        updates: shared tensor → what the tasks wrote, float64: ``before`` minus ``after``.
    """

    tasks: tuple[int, ...]
    own: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    samples: Tensor | None = None
    updates: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        differences = {name: self.before[name].double() - self.after[name].double() for name in self.before}
        object.__setattr__(self, "updates", differences)

    @classmethod
    def of(cls, context: UnlearningContext, samples: Tensor | None = None) -> Evidence:
        """Copy what an unlearning, worked out and not applied yet, is about to remove from a model."""
        plan, removal = context.plan, context.removal
        state = {name: value.detach().cpu().clone() for name, value in context.model.state_dict().items()}
        removed = [name for name in plan.removed if name not in plan.uninformative_masks]
        return cls(
            tasks=context.tasks,
            own={name: state[name] for name in removed if name in state},
            masks=_masks(context.model, context.tasks, context.opened_whole),
            before={name: state[name] for name in removal.values},
            after={name: value.detach().cpu().clone() for name, value in removal.values.items()},
            samples=None if samples is None else samples.detach().cpu(),
        )

    def traces(self) -> tuple[Trace, ...]:
        """Hashes of everything that is large and varied enough."""
        values: list[tuple[Kind, Mapping[str, Tensor]]] = [
            ("own tensor", self.own),
            ("state before", self.before),
            ("update", self.updates),
        ]
        of_values = [
            Trace(kind, name, tensor.numel(), values_hash(tensor))
            for kind, tensors in values
            for name, tensor in tensors.items()
            if telling(tensor)
        ]
        masks = [
            Trace("mask", name, mask.numel(), pattern_hash(mask)) for name, mask in self.masks.items() if telling(mask)
        ]
        return (*of_values, *masks)

    def fingerprint(self) -> Fingerprint:
        """One-way fingerprint, which a record may keep."""
        sketches = {}
        for name, update in self.updates.items():
            of_update, of_after = sketch(update, name), sketch(self.after[name], name)
            if of_update is not None and of_after is not None and bool(update.any()):
                sketches[name] = Sketch(update.numel(), tuple(of_update.tolist()), tuple(of_after.tolist()))
        return Fingerprint(self.traces(), sketches)


def take_evidence(strategy: Strategy, tasks: Iterable[int], experiences: Iterable[Any] = ()) -> Evidence:
    """Evidence of what tasks have put into the model, to be looked for after they are unlearned; changes nothing.

    Args:
        strategy: with an :class:`~avalanche_amnesia.training.UnlearningPlugin`.
        tasks: that could be unlearned now.
        experiences: the tasks' data, if their samples shall be looked for too.

    Raises:
        RequestError: if the tasks can't be requested now.
    """
    samples = [task_data(experience)[0] for experience in experiences]
    context = unlearning_of(strategy).prepared(strategy, tasks)
    return Evidence.of(context, torch.cat(samples) if samples else None)


def take_fingerprint(context: UnlearningContext) -> Fingerprint:
    """Fingerprint of what an unlearning removes, for its record: ``strategy.unlearn([0], fingerprint=…)``."""
    return Evidence.of(context).fingerprint()


def _masks(model: nn.Module, tasks: Sequence[int], uninformative: Mapping[int, Collection[str]]) -> dict[str, Tensor]:
    if not isinstance(model, TaskMaskedModel):
        return {}
    found: dict[str, Tensor] = {}
    for task in tasks:
        if task in model.masks:
            parts = {name: mask.detach().cpu() > 0 for name, mask in model.masks[task].items()}
            of_layers = {name: part for name, part in parts.items() if name not in uninformative.get(task, ())}
            found |= {f"mask of task {task}, {name}": part for name, part in of_layers.items()}
            if of_layers:
                found[f"mask of task {task}"] = torch.cat([part.reshape(-1) for part in parts.values()])
    return found
