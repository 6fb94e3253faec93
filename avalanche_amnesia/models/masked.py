"""A backbone with a mask over its units per task: hard attention to the task (HAT, Serrà et al., ICML 2018)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.gate import EntriesOfMasks, Gate
from avalanche_amnesia.models.multi_head import inside_backbone
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_store import TaskModules, TaskTensors
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.masked_backbone import MaskedBackbone
from avalanche_amnesia.unit_graph.masking import LayerMasks
from avalanche_amnesia.unit_graph.task_owned import OwnModules
from avalanche_amnesia.unit_graph.tracing import NormChoice, trace_backbone

if TYPE_CHECKING:
    from avalanche_amnesia.models.description import Description


class MaskedModel(TaskMaskedModel):
    """Any traceable backbone with one mask per task over the units of all its weighted layers, and one head per task.

    A task without a mask (trained by a strategy that does not mask) uses all units. While a task is being masked its
    gate is ``σ(scale · embedding)`` in training mode and binary in evaluation mode; afterwards its binary mask is
    kept in a buffer. Masks of all layers lie in one vector, in the order of :attr:`graph`'s layers. Norms are the
    task's own: made with its head from the backbone's, taken over the units in its mask, removed with it.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``; read by torch.export and validated. Its
            parameters are used as they are (the same objects): pretrained weights are ``θ^(0)``. Those that do not
            require gradients stay as they are for all tasks, and have no masks. What returns more than features (a
            ``ModelOutput``, a tuple) will do where one tensor of it has two axes.
        input_shape: shape of one input without the batch; found by trying where the features' width does not depend
            on it.
        example: a batch, in place of the shape: a tensor ``(batch, …)``, a tuple of tensors, or a mapping of tensors by
            the names that the backbone's forward gives them (token ids and attention mask).
        classifier: name of the backbone's own classifier (``fc`` of a ResNet), which is left out: the features are
            what it was given. Names of several, or of the ``ModuleDict`` or ``ModuleList`` that holds them, will do.
            Avalanche's multi-head classifiers are left out by themselves.
        norm: ``task``: each task has its own parameters and statistics; ``batch``: no parameters, the statistics of
            the batch at hand in evaluation too, as WSN's authors do.
        frozen: names of modules or parameters that the first task alone trains; what they return counts as always
            in use. Such modules run in evaluation mode: no dropout, and running statistics as they were given.
        task_owned: names of modules or parameters of which each task gets a copy.
        trial: whether to try out at once that no task's features move by a bit when everything outside of random masks
            is moved (a few forwards on copies of the parameters).

    Raises:
        ModelError: if some part of the backbone can't be masked safely; the message says which, why, and the fix.
        ValueError: for a norm or a name that is not known.

    Reference: Serrà et al., Overcoming catastrophic forgetting with hard attention to the task, ICML 2018;
    task-owned norms: Duan, HAT-CL, 2023.
    """

    task_containers = ("heads", "own")
    learned_by = "embedding"
    mask_store, learned_store = "_binary", "_embeddings"
    stores = (mask_store, learned_store, "_importances", "own")
    _importances: TaskTensors
    backbone: MaskedBackbone
    graph: UnitGraph
    own: TaskModules

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
        sizes = [layer.units for layer in graph.layers.values()]
        super().__init__(module, len(graph.output), graph, sizes)
        self._entries_of = EntriesOfMasks(self.graph.open_entries)

    def describe(self) -> Description:
        """Layers, units, what feeds them, and the share of parameters that each rule covers, as a table."""
        from avalanche_amnesia.models.description import Description  # tables are for people: training needs none

        return Description(self.backbone, self.graph, tried=self.backbone.tried)

    # Masks ----------------------------------------------------------------------------------------------------

    @property
    def n_units(self) -> int:
        """Units of all weighted layers together."""
        return sum(self._sizes)

    def read_mask(self, mask: Tensor) -> LayerMasks:
        """A fixed mask over all units, ``(n_units,)``, as a forward of the backbone reads it.

        Of what it closes nothing is computed: features depend on none of it.
        """
        return LayerMasks(self.by_layer(mask.float()), self._entries_of(mask > 0))

    def _chosen(self) -> Tensor:
        return self.gate.open_units()

    def task_embedding(self, task: int) -> Tensor:
        """The embedding that the task's mask was read from, ``(n_units,)``, copied."""
        return self._learned[task].clone()

    def importance(self, task: int) -> Tensor:
        """Importance of each unit in a task, ``(n_units,)``, copied: 1 in its mask where none was measured."""
        kept: Tensor | None = self._importances.get(task)
        return self.binary_mask(task).float() if kept is None else kept.clone()

    def keep_importance(self, task: int, importance: Tensor) -> None:
        """Keep the importance of a finished task's units, ``(n_units,)``, not negative and 0 outside of its mask."""
        self._importances[task] = importance

    def users_of(self, entries: Mapping[str, Tensor], tasks: Sequence[int]) -> frozenset[int]:
        """As the base class's."""
        if not tasks:
            return frozenset()
        found = self.graph.covering(torch.stack([self._masks[task] for task in tasks]), inside_backbone(entries))
        return frozenset(task for task, reads in zip(tasks, found.tolist(), strict=True) if reads)

    def check_gradients(self) -> None:
        """Raise a ModelError if a parameter of the backbone has gradients now and had none when the model was made."""
        learning = {name for name, parameter in self.backbone.named_parameters() if parameter.requires_grad}
        loose = sorted(learning - self.graph.factors.keys() - self.graph.owned)
        if loose:
            raise ModelError(
                f"parameters {loose} had no gradients when the model was made, so that every task reads them and no "
                "mask covers them: make the model when they have, or call requires_grad_(False) on them"
            )

    def utilisation(self, *, counts: bool = False) -> dict[str, dict[int | str, float]]:
        """Share of every layer that each task uses; see :func:`~avalanche_amnesia.models.description.utilisation`.

        Args:
            counts: numbers of open units instead of shares.

        Returns:
            Layer → a row: each task's share, "any" (what any task uses), and "units" (how many there are); last the
            row "all", of all layers together. `pandas.DataFrame.from_dict(rows, orient="index")` makes a frame of them.
        """
        from avalanche_amnesia.models.description import utilisation

        return utilisation(self, counts=counts)

    # What a task has of its own -------------------------------------------------------------------------------

    def adaptation(self, experience: Any) -> None:
        """As the base class's; in a training only the norms of its own tasks learn, whatever samples are replayed."""
        super().adaptation(experience)
        if self.training:
            labels = {int(task) for task in experience.task_labels}
            for task in self.own.unfinished:
                self.own[task].learn(task in labels, True)

    def fresh_parts(self) -> OwnModules:
        """A copy of everything, besides a head, that tasks have of their own, with the backbone's values."""
        return self.backbone.fresh_parts()

    def parts_of(self, task: int) -> OwnModules:
        """Modules of a task besides its head; fresh ones, where it has none yet."""
        parts = self.task_parts(task)
        return parts if isinstance(parts, OwnModules) else self.fresh_parts().train(self.training)

    @torch.no_grad()
    def settle_parts(self, parts: OwnModules, task: int) -> None:
        """End the learning of a task's own norms (or of a copy): outside its binary mask they are as they began."""
        use = self.graph.sets.use(self._masks[task].float())
        parts.settle(self.fresh_parts(), self.backbone.owned, use)

    # Life of a task -------------------------------------------------------------------------------------------

    def start_task(self, task: int, embedding: Tensor) -> nn.Parameter:
        """Begin to learn a task's mask.

        Args:
            task: its label; it must have no mask yet.
            embedding: initial values, ``(n_units,)``.

        Returns:
            The embedding, to be stepped by an optimizer of its own.
        """
        learned = self._begin(task, embedding)
        self._opened = Gate(learned, self.by_layer, self.graph.open_entries)
        return learned

    def finish_task(self) -> None:
        """Keep the binary mask ``a > 0.5`` of the task in training, which ends its training."""
        task = self._keep(self.gate.open_units(), self.gate.embedding.detach())
        if task in self.own:
            self.settle_parts(self.parts_of(task), task)

    @property
    def gate(self) -> Gate:
        """The soft mask of the task in training; a ValueError while there is none."""
        return self._in_training

    # Forward --------------------------------------------------------------------------------------------------

    def _features(self, x: Tensor, task: int) -> Tensor:
        if task == self.current_task and self.training:
            return self.backbone(x, self.parts_of(task), self.gate.leaves)
        return self.masked_features(x, self._mask_or_all(task), self.parts_of(task))

    def masked_features(self, x: Tensor, mask: Tensor | LayerMasks, parts: nn.Module | None = None) -> Tensor:
        """As the base class's; the mask may have been read (:meth:`read_mask`)."""
        own = self.fresh_parts().train(self.training) if parts is None else parts
        return self.backbone(x, own, self.read_mask(mask) if isinstance(mask, Tensor) else mask)

    # State ----------------------------------------------------------------------------------------------------

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        super()._match_tasks(state)
        if self.current_task is not None:  # the middle of its training, loaded again
            self.gate.reread()
            return
        for task in self.own.tasks:
            self.own[task].learn(task not in self._masks, self.training)
