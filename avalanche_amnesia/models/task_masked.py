"""Base class of models with one mask per task, over units or over weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.models.task_store import TaskModules, TaskTensors
from avalanche_amnesia.unit_graph.graph import Computed


class TaskMaskedModel(MultiHeadModel, ABC):
    """Multi-head model with a binary mask per task, which selects the part of the backbone that the task uses.

    Base class of :class:`MaskedModel` (masks over units) and :class:`SubnetModel` (masks over weights). It contains
    their common code: masks by task, training of a task, and state. A subclass defines the meaning of a mask, and how
    to learn, store and apply it.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``.
        n_features: width of the features.
        graph: meaning of a mask's entries, with ``layers``, ``parameter_use``, ``reads`` and ``layer_of`` as in a
            :class:`~avalanche_amnesia.unit_graph.UnitGraph`.
        sizes: number of entries of each part of the mask, in order.

    Attributes:
        graph: meaning of a mask's entries.
        current_task: label of the task in training, None between tasks.
        generation: counter, increased with every change of the set of masks.
        keeps_shared_entries: whether an unlearning leaves an unlearned task's update in entries that a remaining task
            uses (the record lists them). False: the update is removed.
    """

    keeps_shared_entries: bool = False
    features_per_task = True
    state_per_task = True
    learned_by: ClassVar[str]
    """Name of the trainable parameter that determines the current task's mask."""
    stores: ClassVar[Sequence[str]]
    """Names of the stores of per-task modules and tensors except heads, in the order of ``state_dict``."""
    mask_store: ClassVar[str]
    """Name of the store of masks."""
    learned_store: ClassVar[str]
    """Name of the store of the final values of :attr:`learned_by`."""

    def __init__(self, backbone: nn.Module, n_features: int | None, graph: Any, sizes: Sequence[int]) -> None:
        super().__init__(backbone, n_features)
        self.graph = graph
        self.current_task: int | None = None
        self.generation = 0
        self._sizes = list(sizes)
        self._opened: Any = None
        self.register_parameter(self.learned_by, None)
        for name in self.stores:
            self.add_module(name, TaskModules() if name in self.task_containers else TaskTensors())

    @property
    def _masks(self) -> TaskTensors:
        return getattr(self, self.mask_store)

    @property
    def _learned(self) -> TaskTensors:
        return getattr(self, self.learned_store)

    @property
    def _tensors(self) -> dict[str, TaskTensors]:
        return {name: store for name, store in self.named_children() if isinstance(store, TaskTensors)}

    # Masks ----------------------------------------------------------------------------------------------------

    @property
    def masked_tasks(self) -> tuple[int, ...]:
        """Tasks with a mask, in training order."""
        return self._masks.tasks

    @property
    def masks(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Copies of the trained tasks' binary masks: task → part of the mask → bool tensor with one axis."""
        return Computed(self.masked_tasks, lambda task: self.by_layer(self.binary_mask(task)))

    def by_layer(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Split a vector over a whole mask ``(…, n)`` into its parts, by name."""
        return MappingProxyType(dict(zip(self.graph.layers, vector.split(self._sizes, dim=-1), strict=True)))

    def binary_mask(self, task: int) -> Tensor:
        """Return a copy of a task's mask, bool ``(n,)``.

        Raises:
            UnknownTaskError: if the task has no mask.
        """
        if task == self.current_task:
            return self._chosen()
        return self._unpacked(self._kept_mask(task))

    def _kept_mask(self, task: int) -> Tensor:
        if task not in self._masks:
            raise UnknownTaskError(f"task {task} has no mask; tasks with one: {list(self.masked_tasks)}")
        return self._masks[task]

    def cumulative_mask(self, tasks: Iterable[int] | None = None) -> Tensor:
        """Return the union of some tasks' masks, bool ``(n,)``: ``a^{≤t}``, computed again at every call.

        Args:
            tasks: tasks with masks; None: all of them.
        """
        total = self._packed_mask(torch.zeros(sum(self._sizes), dtype=torch.bool, device=self._device))
        for task in self.masked_tasks if tasks is None else tasks:
            total |= self._kept_mask(task)
        return self._unpacked(total)

    def mask_name(self, task: int) -> str:
        """Return the name, in ``state_dict``, of a task's mask."""
        return f"{self.mask_store}.{task}"

    @abstractmethod
    def _chosen(self) -> Tensor:
        """Return the current mask of the task in training, bool ``(n,)``."""

    def _packed_mask(self, mask: Tensor) -> Tensor:
        """Convert a mask, bool ``(n,)``, into its stored form."""
        return mask

    def _unpacked(self, kept: Tensor) -> Tensor:
        """Convert a mask from its stored form into a new tensor, bool ``(n,)``."""
        return kept.clone()

    def mask_bits(self) -> float | None:
        """Return the bits per weight and task of the masks in ``compressed_state``; None if not compressed."""
        return None

    # Entries of the backbone ----------------------------------------------------------------------------------

    def entries_of(self, task: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the backbone entries that a task's mask covers: the task uses them and may change them.

        Args:
            task: a task label; a task without a mask (from a strategy without masks) uses all entries.

        Returns:
            Full parameter name, bool tensor that broadcasts over the parameter.
        """
        for name, covered in self.graph.reads(self.by_layer(self._mask_or_all(task))):
            yield f"backbone.{name}", covered

    def _mask_or_all(self, task: int) -> Tensor:
        """Return a task's mask, bool ``(n,)``; all True if it has none (from a strategy without masks)."""
        if task == self.current_task or task in self._masks:
            return self.binary_mask(task)
        return torch.ones(sum(self._sizes), dtype=torch.bool, device=self._device)

    @abstractmethod
    def users_of(self, entries: Mapping[str, Tensor], tasks: Sequence[int]) -> frozenset[int]:
        """Return the tasks that use any of these entries, i.e. whose :meth:`entries_of` overlap them.

        Args:
            entries: full parameter name → bool tensor of the parameter's shape; entries outside the backbone, and
                entries without masks, are ignored.
            tasks: tasks with masks.
        """

    def shared_state(self) -> list[str]:
        """Return names of tensors that forward passes changed or created, and that all tasks share (normally none)."""
        return []

    # Life of a task -------------------------------------------------------------------------------------------

    @abstractmethod
    def fresh_parts(self) -> nn.Module | None:
        """Return a new task's own modules except its head, with the backbone's values; None if there are none."""

    def task_parts(self, task: int) -> nn.Module | None:
        """Return the task's own modules except its head (norms), or None if it has none."""
        (held,) = self._containers[1:]
        parts: nn.Module | None = held.get(task)
        return parts

    def add_head(self, task: int, n_classes: int) -> None:
        """Add a randomly initialised head ``features → n_classes`` for a task, and its other own modules."""
        super().add_head(task, n_classes)
        parts = self.fresh_parts()
        if parts is not None:
            self._containers[1][task] = parts.train(self.training)

    def set_trainable(self, task: int, learn: bool) -> None:
        """Turn gradients of a task's own modules on or off; current gradients are cleared."""
        for container in self._containers:
            if task in container:
                container[task].requires_grad_(learn).zero_grad()

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Labels of the tasks without a mask; their modules are registered in the model and trainable."""
        return self.heads.unfinished

    def _begin(self, task: int, values: Tensor) -> nn.Parameter:
        """Begin a task: create the parameter ``(n,)`` that determines its mask."""
        if task in self._masks or self.current_task is not None:
            raise ValueError(f"task {task} can't start: masks {self.masked_tasks}, in training {self.current_task}")
        learned = nn.Parameter(values.detach().clone().to(self._device))
        setattr(self, self.learned_by, learned)
        self.current_task = task
        self._masks_changed()
        return learned

    @property
    def _in_training(self) -> Any:
        """Gate or subnetwork of the task in training."""
        if self._opened is None:
            raise AttributeError("no task is in training: start_task begins one")
        return self._opened

    def _keep(self, mask: Tensor, learned: Tensor | None) -> int:
        """End the task in training: store its mask, bool ``(n,)``, and the values it was computed from."""
        task = self.current_task
        assert task is not None
        self._masks[task] = self._packed_mask(mask)
        if learned is not None:
            self._learned[task] = learned
        for container in self._containers:
            container.finish(task)
        self._end_training()
        return task

    @abstractmethod
    def finish_task(self) -> None:
        """End the task in training, and store its mask."""

    def _end_training(self) -> None:
        setattr(self, self.learned_by, None)
        self._opened, self.current_task = None, None
        self._masks_changed()

    def _masks_changed(self) -> None:
        """Update :attr:`generation` after the set of masks changed, or a task's training began."""
        self.generation += 1

    def drop_current_task(self) -> None:
        """Abort the task in training, and remove all its own modules and tensors."""
        task = self.current_task
        self._end_training()
        if task is not None and task in self.heads:
            self.remove_task(task)

    def remove_task(self, task: int) -> None:
        """Remove a task's head, own modules and mask, and all stored values learned from it."""
        for other in self._learned_from([task]):
            self._learned.drop(other)
        super().remove_task(task)
        self._masks_changed()

    def _learned_from(self, tasks: Sequence[int]) -> list[int]:
        """Return the tasks with stored values that depend on these tasks' values."""
        return [task for task in tasks if task in self._learned]

    # Forward --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _features(self, x: Tensor, task: int) -> Tensor:
        """Return features of samples of one task, through its mask."""

    @abstractmethod
    def masked_features(self, x: Tensor, mask: Tensor, parts: nn.Module | None = None) -> Tensor:
        """Return features ``(batch, features)`` through any mask.

        Args:
            x: ``(batch, …)``.
            mask: ``(n,)``.
            parts: a task's :meth:`task_parts`; None: the backbone's.
        """

    # State ----------------------------------------------------------------------------------------------------

    def buffer_names(self, tasks: Sequence[int]) -> list[str]:
        """Return the names, in ``state_dict``, of the tasks' masks, dependent learned values, and statistics."""
        going = dict.fromkeys(self._tensors, tasks) | {self.learned_store: self._learned_from(tasks)}
        tensors = [f"{name}.{task}" for name, of in going.items() for task in of if task in getattr(self, name)]
        return tensors + super().buffer_names(tasks)

    def restore_task_state(self, state: Any) -> None:
        """Restore the per-task state that :meth:`task_state` returned."""
        super().restore_task_state(state)
        self._masks_changed()

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        if self.learned_by in state:  # saved during a task's training, e.g. by early stopping
            if self.current_task is None or state.keys() != self.state_dict().keys():
                task = self.current_task
                now = "none is in training now" if task is None else f"in training is task {task}"
                raise ValueError(
                    "this state was saved in the middle of a task, and can be loaded only in the same training; "
                    f"{now}: save between tasks"
                )
            return
        super()._match_tasks(state)
        for name, store in self._tensors.items():
            store.match(state, f"{name}.", self._device)
        for container in self._containers:
            for task in container.tasks:
                if task in self._masks:
                    container.finish(task)
                elif task not in container.unfinished:
                    container.resume(task)
                    self.set_trainable(task, True)
        self._end_training()
