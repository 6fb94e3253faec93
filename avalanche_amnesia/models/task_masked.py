"""Base class of models with one mask per task, over units or over weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from avalanche_amnesia.bits import pack_bits, unpack_bits
from avalanche_amnesia.models.multi_head import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.models.task_store import TaskTensors
from avalanche_amnesia.unit_graph.graph import LazyMapping


class TaskMaskedModel(MultiHeadModel, ABC):
    """Multi-head model with a binary mask per task, which selects the part of the backbone that the task uses.

    Base class of :class:`MaskedModel` (masks over units) and :class:`SubnetModel` (masks over weights). It contains
    their common code: masks by task, training of a task, and state. A subclass defines the meaning of a mask, and how
    to learn, store and apply it.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``.
        n_features: width of the features.
        graph: meaning of a mask's entries, with ``layers``, ``parameter_use``, ``used_entries`` and ``layer_index`` as
            in a :class:`~avalanche_amnesia.unit_graph.UnitGraph`.
        sizes: number of entries of each part of the mask, in order.

    Attributes:
        graph: meaning of a mask's entries.
        sizes: number of entries of each part of the mask.
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

    def __init__(self, backbone: nn.Module, n_features: int | None, graph: Any, sizes: Sequence[int]) -> None:
        super().__init__(backbone, n_features)
        self.graph = graph
        self.current_task: int | None = None
        self.generation = 0
        self.sizes = list(sizes)
        self._opened: Any = None
        self.register_parameter(self.learned_by, None)
        self._masks = TaskTensors()  # packed bits
        self._learned = TaskTensors()  # final values of the parameter named by `learned_by`

    @property
    def _tensor_stores(self) -> dict[str, TaskTensors]:
        return {name: store for name, store in self.named_children() if isinstance(store, TaskTensors)}

    # Masks ----------------------------------------------------------------------------------------------------

    @property
    def masked_tasks(self) -> tuple[int, ...]:
        """Return the labels of the tasks with a mask, in training order."""
        return self._masks.tasks

    @property
    def masks(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return copies of the trained tasks' binary masks, by task and layer (or tensor) name, as bool vectors."""
        return LazyMapping(self.masked_tasks, lambda task: self.by_layer(self.binary_mask(task)))

    def by_layer(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Split ``vector``, ``(…, n)``, one number per mask entry, into a mapping of layer (or tensor) name to part."""
        return MappingProxyType(dict(zip(self.graph.layers, vector.split(self.sizes, dim=-1), strict=True)))

    def binary_mask(self, task: int) -> Tensor:
        """Return a copy of a task's mask, bool ``(n,)``.

        Raises:
            UnknownTaskError: if the task has no mask.
        """
        if task == self.current_task:
            return self._current_mask()
        if task not in self._masks:
            raise UnknownTaskError(f"task {task} has no mask; tasks with one: {list(self.masked_tasks)}")
        return unpack_bits(self._masks[task], sum(self.sizes))

    def cumulative_mask(self, tasks: Iterable[int] | None = None) -> Tensor:
        """Return the union of some tasks' masks, bool ``(n,)`` (HAT's ``a^{≤t}``), computed again at every call.

        Args:
            tasks: tasks with masks; None: all of them.
        """
        total = torch.zeros(sum(self.sizes), dtype=torch.bool, device=self._device)
        for task in self.masked_tasks if tasks is None else tasks:
            total |= self.binary_mask(task)
        return total

    @abstractmethod
    def _current_mask(self) -> Tensor:
        """Return the current mask of the task in training, bool ``(n,)``."""

    def mask_bits(self) -> float | None:
        """Return the compressed size of all masks, in bits per weight and task; None if masks are not compressed."""
        return None

    # Entries of the backbone ----------------------------------------------------------------------------------

    def entries_of(self, task: int) -> Mapping[str, Tensor]:
        """Return the entries of each backbone parameter that a task's mask covers: the task may use and change them.

        Args:
            task: a task label; a task without a mask (from a strategy without masks) uses all entries.

        Returns:
            Full parameter name → bool tensor of the parameter's shape, computed at each access.
        """
        used = self.graph.used_entries(self.by_layer(self._mask_or_all(task)))
        names = {f"backbone.{name}": name for name in used}
        return LazyMapping(names, lambda name: used[names[name]].expand(self.get_parameter(name).shape))

    def _mask_or_all(self, task: int) -> Tensor:
        """Return a task's mask, bool ``(n,)``; all True if the task was trained by a strategy without masks."""
        if task == self.current_task or task in self._masks:
            return self.binary_mask(task)
        return torch.ones(sum(self.sizes), dtype=torch.bool, device=self._device)

    def users_of(self, entries: Mapping[str, Tensor], tasks: Iterable[int]) -> tuple[int, ...]:
        """Return those of ``tasks`` that use any weight marked True in ``entries`` (parameter name → bool tensor).

        Args:
            entries: full parameter name → bool tensor of the parameter's shape; entries outside the backbone, and
                entries without masks, are ignored.
            tasks: task labels.
        """
        asked = sorted(entries, key=lambda name: entries[name].numel())  # small ones mostly decide
        # Masks of units contain whole filters of a convolution: so these are searched once, not for each task.
        found = dict[str, Tensor]()

        def common(name: str, own: Tensor) -> bool:
            alike = [axis for axis, step in enumerate(own.stride()) if not step]
            if name not in found:
                found[name] = entries[name].any(alike, keepdim=True) if alike else entries[name]
            one = own[tuple(slice(None if step else 1) for step in own.stride())]
            # In numpy, because torch takes several times as long to search bool tensors.
            return bool((one.cpu().numpy() & found[name].cpu().numpy()).any())

        def uses(task: int) -> bool:
            own = self.entries_of(task)
            return any(common(name, own[name]) for name in asked if name in own)

        return tuple(filter(uses, tasks))

    def shared_state(self) -> list[str]:
        """Return names of tensors that forward passes changed or created, and that all tasks share (normally none)."""
        return []

    # Life of a task -------------------------------------------------------------------------------------------

    def set_trainable(self, task: int, learn: bool) -> None:
        """Make a task's head and other modules trainable (``learn=True``) or frozen, and clear their gradients."""
        self.heads[task].requires_grad_(learn).zero_grad()
        parts = self.task_parts(task)
        if parts is not None:
            parts.requires_grad_(learn)  # again, because OwnModules keeps what the backbone has frozen

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Return the labels of the tasks whose training is not finished: their modules are registered and trainable."""
        return self.heads.unfinished

    def start_task(self, task: int, values: Tensor) -> nn.Parameter:
        """Start training a task's mask: register the parameter that determines the mask, with initial ``values``.

        Args:
            task: label of a task without a mask.
            values: initial values ``(n,)`` of the parameter that determines the mask (:attr:`learned_by`).

        Returns:
            The parameter, for a separate optimizer.
        """
        if task in self._masks or self.current_task is not None:
            raise ValueError(f"task {task} can't start: masks {self.masked_tasks}, in training {self.current_task}")
        learned = nn.Parameter(values.detach().clone().to(self._device))
        setattr(self, self.learned_by, learned)
        self.current_task, self._opened = task, self._open(learned)
        self._masks_changed()
        return learned

    @abstractmethod
    def _open(self, learned: nn.Parameter) -> Any:
        """Return an object that computes a new task's mask from ``learned``: a gate (units) or subnetwork (weights)."""

    @property
    def _in_training(self) -> Any:
        """Return the gate or subnetwork of the task in training; raise AttributeError if no task is in training."""
        if self._opened is None:
            raise AttributeError("no task is in training: start_task begins one")
        return self._opened

    def learned_by_backward(self) -> list[Tensor]:
        """Return all parameters, with the mask's parameter replaced by the leaf tensors that receive its gradient."""
        learned = None if self._opened is None else getattr(self, self.learned_by)
        leaves = () if self._opened is None else self._opened.leaves.values()
        return [*(p for p in self.parameters() if p is not learned), *leaves]

    def _store_mask(self, mask: Tensor, learned: Tensor | None) -> int:
        """Finish the task in training: store its mask, bool ``(n,)``, and the values that the mask is computed from."""
        task = self.current_task
        assert task is not None
        self._masks[task] = pack_bits(mask)
        if learned is not None:
            self._learned[task] = learned
        self.heads.finish(task)
        self._end_training()
        return task

    @abstractmethod
    def finish_task(self) -> None:
        """Finish the task in training, and store its mask."""

    def _end_training(self) -> None:
        setattr(self, self.learned_by, None)
        self._opened, self.current_task = None, None
        self._masks_changed()

    def _masks_changed(self) -> None:
        """Increase :attr:`generation` after the set of masks has changed or a task's training has begun."""
        self.generation += 1

    def drop_current_task(self) -> None:
        """Abort the training of the current task, and remove all modules and tensors of the task."""
        task = self.current_task
        self._end_training()
        if task is not None and task in self.heads:
            self.remove_task(task)

    def remove_task(self, task: int) -> None:
        """Remove a task's head, other modules and mask, and all stored embeddings or scores that depend on the task."""
        for other in self._dependent_tasks([task]):
            self._learned.drop(other)
        super().remove_task(task)
        self._masks_changed()

    def _dependent_tasks(self, tasks: Sequence[int]) -> list[int]:
        """Return the tasks with a stored embedding or scores that depend on the training of ``tasks``."""
        return [task for task in tasks if task in self._learned]

    @abstractmethod
    def _features(self, x: Tensor, task: int) -> Tensor:
        """Return features of samples that all belong to ``task``, computed with the task's mask."""

    @abstractmethod
    def masked_features(self, x: Tensor, mask: Tensor, parts: nn.Module | None = None) -> Tensor:
        """Return features ``(batch, features)``, computed with any mask.

        Args:
            x: ``(batch, …)``.
            mask: ``(n,)``.
            parts: a task's :meth:`task_parts`; None: the backbone's.
        """

    def buffer_names(self, tasks: Sequence[int]) -> list[str]:
        """Return the ``state_dict`` names of buffers of ``tasks``, and of stored values that depend on these tasks."""
        going = dict.fromkeys(self._tensor_stores, tasks) | {"_learned": self._dependent_tasks(tasks)}
        tensors = [f"{name}.{task}" for name, of in going.items() for task in of if task in getattr(self, name)]
        return tensors + super().buffer_names(tasks)

    def restore_task_state(self, state: Any) -> None:
        """Restore the per-task modules and tensors that :meth:`task_state` returned."""
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
        for name, store in self._tensor_stores.items():
            store.match(state, f"{name}.", self._device)
        for task in self.tasks:
            if task in self._masks:
                self.heads.finish(task)
            elif task not in self.heads.unfinished:
                self.heads.resume(task)
                self.set_trainable(task, True)
        self._end_training()
