"""A backbone whose units every task masks in its own way: hard attention to the task (METHOD §2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models.graph import UnitGraph
from avalanche_amnesia.models.multi_head import UnknownTaskError, single_task
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.tracing import trace_backbone


class _TaskBuffers(nn.Module):
    """One buffer per task, so that masks follow ``state_dict``, ``.to`` and ``deepcopy``."""

    def put(self, task: int, value: Tensor) -> None:
        if str(task) in self._buffers:
            self._buffers[str(task)] = value
        else:
            self.register_buffer(str(task), value)

    def get(self, task: int) -> Tensor:
        value = self._buffers[str(task)]
        assert value is not None
        return value

    def drop(self, task: int) -> None:
        del self._buffers[str(task)]

    @property
    def tasks(self) -> tuple[int, ...]:
        return tuple(int(name) for name in self._buffers)


class MaskedModel(TaskMaskedModel):
    """Any traceable backbone with one mask per task over the units of all its weighted layers, and one head per task.

    A task without a mask (trained by a strategy that does not mask) uses all units. While a task is being masked its
    gate is ``σ(scale · embedding)`` in training mode and binary in evaluation mode; afterwards its binary mask is
    kept in a buffer. Masks of all layers lie in one vector, in the order of :attr:`graph`'s layers.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``; traced by torch.fx and validated. Its
            parameters are used as they are (the same objects).
        input_shape: shape of one input without the batch; only where the features' width can't be read off the layers.

    Raises:
        ModelError: if some part of the backbone can't be masked safely; the message says which, why, and the mend.

    Reference: Serrà et al., Overcoming catastrophic forgetting with hard attention to the task, ICML 2018.
    """

    backbone: nn.Module
    graph: UnitGraph

    def __init__(self, backbone: nn.Module, *, input_shape: tuple[int, ...] | None = None) -> None:
        module, graph = trace_backbone(backbone, input_shape)
        assert graph.output.size is not None
        super().__init__(module, graph.output.size)
        self.graph = graph
        self._sizes = [layer.units for layer in graph.layers.values()]
        self._binary = _TaskBuffers()
        self._embeddings = _TaskBuffers()
        self.embedding: nn.Parameter | None = None
        self.current_task: int | None = None
        self.gate: Tensor | None = None
        self._gate_leaves: dict[str, Tensor] = {}
        self.generation = 0

    # Masks ----------------------------------------------------------------------------------------------------

    @property
    def n_units(self) -> int:
        """Units of all weighted layers together."""
        return sum(self._sizes)

    @property
    def masks(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Binary masks of the trained tasks: task → layer name → bool tensor ``(units,)``. Read-only views."""
        return MappingProxyType({task: self.by_layer(self._binary.get(task)) for task in self._binary.tasks})

    def by_layer(self, vector: Tensor) -> Mapping[str, Tensor]:
        """A vector over all units ``(…, n_units)`` cut into layers: layer name → ``(…, units)``."""
        return MappingProxyType(dict(zip(self.graph.layers, vector.split(self._sizes, dim=-1), strict=True)))

    def binary_mask(self, task: int) -> Tensor:
        """The task's mask over all units, bool ``(n_units,)``, copied.

        Raises:
            UnknownTaskError: if the task has no mask.
        """
        if task == self.current_task:
            return self._open_units()
        if task not in self._binary.tasks:
            raise UnknownTaskError(f"task {task} has no mask; tasks with one: {list(self._binary.tasks)}")
        return self._binary.get(task).clone()

    def task_embedding(self, task: int) -> Tensor:
        """The embedding that the task's mask was read from, ``(n_units,)``, copied."""
        return self._embeddings.get(task).clone()

    def cumulative_mask(self) -> Tensor:
        """Units that any remaining task uses, bool ``(n_units,)``: ``a^{≤t}``, rebuilt from the masks at every call."""
        masks = [self._binary.get(task) for task in self._binary.tasks]
        if not masks:
            return torch.zeros(self.n_units, dtype=torch.bool, device=self._device)
        return torch.stack(masks).any(0)

    @property
    def _device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    # Life of a task -------------------------------------------------------------------------------------------

    def start_task(self, task: int, embedding: Tensor) -> None:
        """Begin to learn a task's mask.

        Args:
            task: its label; it must have no mask yet.
            embedding: initial values, ``(n_units,)``.
        """
        if task in self._binary.tasks or self.current_task is not None:
            raise ValueError(f"task {task} can't start: masks {self._binary.tasks}, in training {self.current_task}")
        self.embedding = nn.Parameter(embedding.detach().clone().to(self._device))
        self.current_task = task
        self.open_gate(1.0)
        self.generation += 1

    def finish_task(self) -> None:
        """Keep the binary mask ``a > 0.5`` of the task in training, which ends its training."""
        assert self.current_task is not None
        assert self.embedding is not None
        task, embedding = self.current_task, self.embedding.detach()
        self._binary.put(task, self._open_units())
        self._embeddings.put(task, embedding)
        self._end_training()

    def drop_current_task(self) -> None:
        """Give up the task in training: its embedding and head go."""
        task = self.current_task
        self._end_training()
        if task is not None and str(task) in self.heads:
            super().remove_task(task)

    def _end_training(self) -> None:
        self.embedding, self.gate, self.current_task = None, None, None
        self._gate_leaves = {}
        self.generation += 1

    def remove_task(self, task: int) -> None:
        """Take out the task's head, mask and embedding."""
        super().remove_task(task)
        if task in self._binary.tasks:
            self._binary.drop(task)
            self._embeddings.drop(task)
        self.generation += 1

    def task_state(self) -> Any:
        """As the base class's, with masks and embeddings."""
        return super().task_state(), dict(self._binary._buffers), dict(self._embeddings._buffers)

    def restore_task_state(self, state: Any) -> None:
        """As the base class's."""
        heads, binary, embeddings = state
        super().restore_task_state(heads)
        self._binary._buffers, self._embeddings._buffers = dict(binary), dict(embeddings)
        self.generation += 1

    @torch.no_grad()
    def open_gate(self, scale: float) -> Tensor:
        """Set the soft mask ``σ(scale · e)`` through which the task in training is run in training mode.

        Its layers are leaves, whose gradients collect over every forward until the next call: the way from there to
        the embedding is short enough to be gone by hand, once per step.

        Args:
            scale: ``s`` of the mini-batch.

        Returns:
            The gate ``a``, ``(n_units,)``.
        """
        assert self.embedding is not None
        if self.gate is None:  # the leaves are views that live as long as the task's training
            self.gate = torch.empty_like(self.embedding)
            self._gate_leaves = {name: part.requires_grad_() for name, part in self.by_layer(self.gate).items()}
        torch.mul(self.embedding, scale, out=self.gate).sigmoid_()
        for leaf in self._gate_leaves.values():
            leaf.grad = None
        return self.gate

    def gate_gradient(self) -> Tensor:
        """``∂loss/∂a`` of the open gate, ``(n_units,)``; zero for layers that no backward pass reached."""
        leaves = self._gate_leaves.values()
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])

    def _open_units(self) -> Tensor:
        assert self.embedding is not None
        return self.embedding.detach() > 0  # σ(s·e) > ½ at every scale

    def buffer_names(self, tasks: Sequence[int]) -> list[str]:
        """Names, in ``state_dict``, of the masks and embeddings of the tasks."""
        kept = {"_binary": self._binary.tasks, "_embeddings": self._embeddings.tasks}
        return [f"{name}.{task}" for name, have in kept.items() for task in tasks if task in have]

    # Forward --------------------------------------------------------------------------------------------------

    def _binary_gate(self, task: int, dtype: torch.dtype) -> Tensor:
        """The 0/1 vector that masks a task's forward; all ones where the task has no mask."""
        if task == self.current_task:
            return self._open_units().to(dtype)
        if task in self._binary.tasks:
            return self._binary.get(task).to(dtype)
        return torch.ones(self.n_units, dtype=dtype, device=self._device)

    def features(self, x: Tensor, task: int | Tensor) -> Tensor:
        """Features ``(batch, features)`` through the task's mask; one label, or one per sample ``(batch,)``."""
        single = single_task(task)
        if single is not None:
            if single == self.current_task and self.training:
                return self.backbone(x, self._gate_leaves)
            return self.masked_features(x, self._binary_gate(single, x.dtype))
        assert isinstance(task, Tensor)
        labels, rows = task.unique(return_inverse=True)
        gates = [
            torch.cat(list(self._gate_leaves.values()))
            if int(label) == self.current_task and self.training
            else self._binary_gate(int(label), x.dtype)
            for label in labels
        ]
        return self.masked_features(x, torch.stack(gates)[rows])

    def masked_features(self, x: Tensor, mask: Tensor) -> Tensor:
        """Features ``(batch, features)`` through any mask over all units, ``(n_units,)`` or ``(batch, n_units)``."""
        return self.backbone(x, self.by_layer(mask.to(x.dtype)))

    # State ----------------------------------------------------------------------------------------------------

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        if "embedding" in state:
            raise ValueError("this state was saved in the middle of a task; save between tasks")
        super()._match_tasks(state)
        for buffers, prefix in ((self._binary, "_binary."), (self._embeddings, "_embeddings.")):
            saved = {int(name.removeprefix(prefix)): v for name, v in state.items() if name.startswith(prefix)}
            for task in set(buffers.tasks) - set(saved):
                buffers.drop(task)
            for task, value in saved.items():
                buffers.put(task, torch.zeros_like(value, device=self._device))
        self._end_training()
