"""Model with a mask over units for each task: hard attention to the task (HAT, Serrà et al., ICML 2018)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.gate import Gate
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_store import TaskTensors
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import OpenEntries, UnitGraph
from avalanche_amnesia.unit_graph.masked_backbone import MaskedBackbone
from avalanche_amnesia.unit_graph.masking import LayerMasks
from avalanche_amnesia.unit_graph.task_owned import OwnModules
from avalanche_amnesia.unit_graph.tracing import Cache, NormChoice, trace_backbone

if TYPE_CHECKING:
    from avalanche_amnesia.models.description import Description


class MaskedModel(TaskMaskedModel):
    """Multi-head model with one mask per task over the units of all weighted layers of a traceable backbone.

    A task without a mask (trained by a strategy without masks) uses all units. During a task's training, its
    gate is ``σ(scale · embedding)`` in training mode and binary in evaluation mode. Afterwards its binary mask is
    stored in a buffer. A mask is one vector over all layers, in the order of :attr:`graph`'s layers. Each task has its
    own norms: copies of the backbone's, restricted to the units in its mask, created and removed with its head.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``; traced by torch.export and validated. Its
            parameters stay the same objects, and pretrained weights are ``θ^(0)``. Parameters without gradients have no
            masks, stay constant and are shared by all tasks. Outputs with several tensors (a ``ModelOutput``, a tuple)
            are allowed if exactly one of them has two axes.
        input_shape: shape of one input without the batch; by default found by trial if the width of the features does
            not depend on it.
        example: a batch, instead of the shape: a tensor ``(batch, …)``, a tuple of tensors, or a mapping of tensors by
            the names of the forward's arguments (token ids and attention mask).
        classifier: name of the backbone's own classifier (``fc`` of a ResNet), which is removed: its input becomes the
            features. Several names, or the name of a ``ModuleDict`` or ``ModuleList`` of classifiers, are allowed.
            Avalanche's multi-head classifiers are removed automatically.
        norm: ``task``: each task has its own parameters and statistics; ``batch``: no parameters, and statistics of
            the current batch in evaluation too, as in WSN's code.
        frozen: names of modules or parameters that only the first task trains; their outputs count as always
            in use. Such modules run in evaluation mode: no dropout, and the original running statistics.
        task_owned: names of modules or parameters; each task gets its own copy of them.
        trial: whether to check at once, with a few forward passes on copies of the parameters, that no feature changes
            by a bit when all parameters outside random masks change.

    Raises:
        ModelError: if a part of the backbone can't be masked safely; the message says which part, why, and the fix.
        ValueError: for an unknown norm or name.

    Reference: Serrà et al., Overcoming catastrophic forgetting with hard attention to the task, ICML 2018;
    task-owned norms: Duan, HAT-CL, 2023.
    """

    learned_by = "embedding"
    backbone: MaskedBackbone
    graph: UnitGraph

    def __init__(
        self,
        backbone: nn.Module,
        *,
        input_shape: tuple[int, ...] | None = None,
        example: Any = None,
        classifier: str | Sequence[str] | None = None,
        norm: NormChoice = "task",
        frozen: Collection[str] = (),
        task_owned: Collection[str] = (),
        trial: bool = True,
    ) -> None:
        module, graph = trace_backbone(
            backbone,
            input_shape,
            example=example,
            classifier=classifier,
            norm=norm,
            frozen=frozen,
            task_owned=task_owned,
            trial=trial,
        )
        super().__init__(module, len(graph.output), graph, [layer.units for layer in graph.layers.values()])
        self._importances = TaskTensors()
        self._entries: Cache[Mapping[str, OpenEntries]] = Cache(32)  # usually enough for the tasks of a mini-batch

    def describe(self) -> Description:
        """Return a table of the layers, their units and inputs, and the shares of masked and other parameters."""
        from avalanche_amnesia.models.description import Description  # lazy, because training needs no tables

        return Description(self.backbone, self.graph, tried=self.backbone.tried)

    @property
    def n_units(self) -> int:
        """Return the number of units of all weighted layers together."""
        return sum(self.sizes)

    def read_mask(self, mask: Tensor) -> LayerMasks:
        """Split a fixed mask over all units, ``(n_units,)``, into one mask per layer for the backbone's forward pass.

        Closed units are not computed, so features do not depend on them.
        """
        units = mask > 0
        key = units.device, units.cpu().numpy().tobytes()
        entries = self._entries.get(key)
        if entries is None:
            self._entries.put(key, entries := self.graph.open_entries(units))
        return LayerMasks(self.by_layer(mask.float()), entries)

    def _current_mask(self) -> Tensor:
        return self.gate.open_units()

    def task_embedding(self, task: int) -> Tensor:
        """Return a copy of the trained embedding that determines a task's mask, ``(n_units,)``."""
        return self._learned[task].clone()

    def importance(self, task: int) -> Tensor:
        """Return a copy of the importance of each unit for a task, ``(n_units,)``; by default, the task's 0/1 mask."""
        kept: Tensor | None = self._importances.get(task)
        return self.binary_mask(task).float() if kept is None else kept.clone()

    def keep_importance(self, task: int, importance: Tensor) -> None:
        """Store all units' importances for a finished task, ``(n_units,)``: nonnegative, 0 outside the task's mask."""
        self._importances[task] = importance

    def check_gradients(self) -> None:
        """Raise a ModelError if a backbone parameter requires gradients now but did not when the model was created."""
        learning = {name for name, parameter in self.backbone.named_parameters() if parameter.requires_grad}
        if loose := sorted(learning - self.graph.factors.keys() - self.graph.owned):
            raise ModelError(
                f"parameters {loose} had no gradients when the model was made, so that every task reads them and no "
                "mask covers them: make the model when they have, or call requires_grad_(False) on them"
            )

    def utilisation(self, *, counts: bool = False) -> dict[str, dict[int | str, float]]:
        """Return a table: for each layer and each task with a mask, the fraction of the layer's units in the mask.

        Args:
            counts: return numbers of open units instead.

        Returns:
            Layer → row: each task's share, "any" (share used by any task), and "units" (number of units); the last
            row, "all", is over all layers. `pandas.DataFrame.from_dict(rows, orient="index")` turns it into a table.

        Reference: the share of active mask entries by layer and task, Duan, HAT-CL, 2023.
        """
        units = {name: layer.units for name, layer in self.graph.layers.items()}
        if "all" in units:
            raise ValueError("a layer of the model is called 'all', the name of the table's last row: rename it")
        in_use = self.by_layer(self.cumulative_mask())
        columns: dict[int | str, Mapping[str, Tensor]] = {**dict(self.masks.items()), "any": in_use}
        rows: dict[str, dict[int | str, float]] = {
            name: {**{column: int(mask[name].sum()) for column, mask in columns.items()}, "units": n}
            for name, n in units.items()
        }
        rows["all"] = {column: sum(row[column] for row in rows.values()) for column in (*columns, "units")}
        if counts:
            return rows
        return {
            name: {column: n if column == "units" else n / row["units"] for column, n in row.items()}
            for name, row in rows.items()
        }

    def fresh_parts(self) -> OwnModules:
        """Return a new task's copies of the per-task modules (except its head), with the backbone's values."""
        return self.backbone.fresh_parts()

    @torch.no_grad()
    def finish_parts(self, parts: OwnModules, task: int) -> None:
        """Set a task's modules to evaluation mode; reset norm entries of units outside its mask to initial values."""
        parts.finish(self.fresh_parts(), self.backbone.owned, self.graph.sets.use(self.binary_mask(task).float()))

    def _open(self, learned: nn.Parameter) -> Gate:
        return Gate(learned, self.by_layer, self.graph.open_entries)

    def finish_task(self) -> None:
        """Finish the task in training: store its binary mask ``a > 0.5`` and its embedding, and freeze its modules."""
        task = self._store_mask(self.gate.open_units(), self.gate.embedding.detach())
        if task in self.heads:
            self.finish_parts(self.task_parts(task), task)

    @property
    def gate(self) -> Gate:
        """Return the soft mask of the task in training; raise AttributeError if no task is in training."""
        return self._in_training

    def _features(self, x: Tensor, task: int) -> Tensor:
        mask = self.gate.leaves if task == self.current_task and self.training else self._mask_or_all(task)
        return self.masked_features(x, mask, self.task_parts(task))

    def masked_features(self, x: Tensor, mask: Tensor | LayerMasks, parts: nn.Module | None = None) -> Tensor:
        """Return features ``(batch, features)`` with any unit mask: a vector, or a result of :meth:`read_mask`."""
        own = self.fresh_parts().train(self.training) if parts is None else parts
        return self.backbone(x, own, self.read_mask(mask) if isinstance(mask, Tensor) else mask)

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        super()._match_tasks(state)
        if self.current_task is not None:  # a state saved during this training
            self.gate.reread()
            return
        for task in self.tasks:
            self.task_parts(task).learn(task not in self._masks, self.training)
