"""Interface of models with one mask per task, over units or over weights."""

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
    """A multi-head model of which every task uses the part that its binary mask names.

    Base of :class:`MaskedModel` (masks over units) and :class:`SubnetModel` (masks over weights): masks by task, the
    life of a task, and the state are theirs in common. A subclass says what a mask covers, how one is learned, kept and
    run through.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``.
        n_features: width of the features.
        graph: what the entries of a mask stand for, with ``layers``, ``parameter_use``, ``reads`` and ``layer_of`` as a
            :class:`~avalanche_amnesia.unit_graph.UnitGraph` has them.
        sizes: numbers of entries of the mask's parts, in order.

    Attributes:
        graph: what the entries of a mask stand for.
        current_task: label of the task in training, None between tasks.
        generation: grows with every change of the set of masks.
        keeps_shared_entries: whether an entry that a forgotten task wrote, and a remaining task reads, stays as it is
            (the record lists it). False: the forgotten task's update is taken out of it.
    """

    keeps_shared_entries: bool = False
    features_per_task = True
    state_per_task = True
    learned_by: ClassVar[str]
    """Name of the parameter by which the task in training learns its mask."""
    stores: ClassVar[Sequence[str]]
    """Names of what tasks have besides heads, in the order of ``state_dict``."""
    mask_store: ClassVar[str]
    """Name of the store of masks."""
    learned_store: ClassVar[str]
    """Name of the store of what :attr:`learned_by` was when a task ended."""

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
        """Tasks that have a mask, in the order in which they were trained."""
        return self._masks.tasks

    @property
    def masks(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Binary masks of the trained tasks: task → part of the mask → bool tensor, one-dimensional, copied."""
        return Computed(self.masked_tasks, lambda task: self.by_layer(self.binary_mask(task)))

    def by_layer(self, vector: Tensor) -> Mapping[str, Tensor]:
        """A vector over a whole mask ``(…, n)`` cut into its parts, by name."""
        return MappingProxyType(dict(zip(self.graph.layers, vector.split(self._sizes, dim=-1), strict=True)))

    def binary_mask(self, task: int) -> Tensor:
        """A task's mask, bool ``(n,)``, a new tensor.

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
        """Entries that any of some tasks uses, bool ``(n,)``: ``a^{≤t}``, rebuilt from the masks at every call.

        Args:
            tasks: with masks; None: every remaining task.
        """
        total = self._packed_mask(torch.zeros(sum(self._sizes), dtype=torch.bool, device=self._device))
        for task in self.masked_tasks if tasks is None else tasks:
            total |= self._kept_mask(task)
        return self._unpacked(total)

    def mask_name(self, task: int) -> str:
        """Name, in ``state_dict``, of the tensor that holds a task's mask."""
        return f"{self.mask_store}.{task}"

    @abstractmethod
    def _chosen(self) -> Tensor:
        """Mask that the task in training would have if it ended now, bool ``(n,)``."""

    def _packed_mask(self, mask: Tensor) -> Tensor:
        """A mask, bool ``(n,)``, as the store holds it."""
        return mask

    def _unpacked(self, kept: Tensor) -> Tensor:
        """A mask, bool ``(n,)``, a new tensor, from what the store holds."""
        return kept.clone()

    def mask_bits(self) -> float | None:
        """Bits per weight and task that the masks take in ``compressed_state``; None where none is compressed."""
        return None

    # Entries of the backbone ----------------------------------------------------------------------------------

    def entries_of(self, task: int) -> Iterator[tuple[str, Tensor]]:
        """Entries of the backbone that a task reads and may write: those that its mask covers.

        Args:
            task: with a mask; without one, as stock strategies train, it uses every entry.

        Returns:
            Full parameter name, bool tensor that broadcasts over the parameter.
        """
        for name, covered in self.graph.reads(self.by_layer(self._mask_or_all(task))):
            yield f"backbone.{name}", covered

    def _mask_or_all(self, task: int) -> Tensor:
        """A task's mask, bool ``(n,)``; one without a mask, as stock strategies train it, uses every entry."""
        if task == self.current_task or task in self._masks:
            return self.binary_mask(task)
        return torch.ones(sum(self._sizes), dtype=torch.bool, device=self._device)

    @abstractmethod
    def users_of(self, entries: Mapping[str, Tensor], tasks: Sequence[int]) -> frozenset[int]:
        """Tasks that read any of some entries: whose :meth:`entries_of` meet them.

        Args:
            entries: full parameter name → bool tensor of the parameter's shape; those outside the backbone, and those
                that no mask covers, count for none.
            tasks: with masks.
        """

    def shared_state(self) -> list[str]:
        """Names of tensors that forwards changed, or began to keep, and that all tasks share; empty: there are none."""
        return []

    # Life of a task -------------------------------------------------------------------------------------------

    @abstractmethod
    def fresh_parts(self) -> nn.Module | None:
        """Modules that a task begins with, besides its head, with the backbone's values; None: nothing."""

    def task_parts(self, task: int) -> nn.Module | None:
        """The task's own normalisation, on which its features depend besides its mask; None where it has none."""
        (held,) = self._containers[1:]
        parts: nn.Module | None = held.get(task)
        return parts

    def add_head(self, task: int, n_classes: int) -> None:
        """Add a freshly drawn head ``features → n_classes`` for a task, and what else it has of its own."""
        super().add_head(task, n_classes)
        parts = self.fresh_parts()
        if parts is not None:
            self._containers[1][task] = parts.train(self.training)

    def set_trainable(self, task: int, learn: bool) -> None:
        """Let a task's own modules (its head) receive gradients, or not; drops those that they have."""
        for container in self._containers:
            if task in container:
                container[task].requires_grad_(learn).zero_grad()

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Labels of the tasks without a mask, whose modules are part of the model and may learn."""
        return self.heads.unfinished

    def _begin(self, task: int, values: Tensor) -> nn.Parameter:
        """Make the parameter ``(n,)`` by which a task learns its mask."""
        if task in self._masks or self.current_task is not None:
            raise ValueError(f"task {task} can't start: masks {self.masked_tasks}, in training {self.current_task}")
        learned = nn.Parameter(values.detach().clone().to(self._device))
        setattr(self, self.learned_by, learned)
        self.current_task = task
        self._masks_changed()
        return learned

    @property
    def _in_training(self) -> Any:
        """What the task in training is run through."""
        if self._opened is None:
            raise ValueError("no task is in training: start_task begins one")
        return self._opened

    def _keep(self, mask: Tensor, learned: Tensor | None) -> int:
        """Keep the mask, bool ``(n,)``, of the task in training, and what it was learned by; ends the training."""
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
        """Keep the mask of the task in training, which ends its training."""

    def _end_training(self) -> None:
        setattr(self, self.learned_by, None)
        self._opened, self.current_task = None, None
        self._masks_changed()

    def _masks_changed(self) -> None:
        """Note that a mask came or went, or begins to be learned."""
        self.generation += 1

    def drop_current_task(self) -> None:
        """Give up the task in training, with everything that is its own."""
        task = self.current_task
        self._end_training()
        if task is not None and task in self.heads:
            self.remove_task(task)

    def remove_task(self, task: int) -> None:
        """Take out everything of a task: its head, its own modules, its mask, and what was learned from it."""
        for other in self._learned_from([task]):
            self._learned.drop(other)
        super().remove_task(task)
        self._masks_changed()

    def _learned_from(self, tasks: Sequence[int]) -> list[int]:
        """Tasks whose learned values are kept, and came out of those of some tasks."""
        return [task for task in tasks if task in self._learned]

    # Forward --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _features(self, x: Tensor, task: int) -> Tensor:
        """Features of samples of one task, through its mask."""

    @abstractmethod
    def masked_features(self, x: Tensor, mask: Tensor, parts: nn.Module | None = None) -> Tensor:
        """Features ``(batch, features)`` through any mask.

        Args:
            x: ``(batch, …)``.
            mask: ``(n,)``.
            parts: a task's :meth:`task_parts`; None: as the backbone has them.
        """

    # State ----------------------------------------------------------------------------------------------------

    def buffer_names(self, tasks: Sequence[int]) -> list[str]:
        """Names, in ``state_dict``, of the tasks' tensors, of what was learned from them, and of their statistics."""
        going = dict.fromkeys(self._tensors, tasks) | {self.learned_store: self._learned_from(tasks)}
        tensors = [f"{name}.{task}" for name, of in going.items() for task in of if task in getattr(self, name)]
        return tensors + super().buffer_names(tasks)

    def restore_task_state(self, state: Any) -> None:
        """As the base class's."""
        super().restore_task_state(state)
        self._masks_changed()

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        if self.learned_by in state:  # from the middle of a task's training: early stopping goes back to it
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
