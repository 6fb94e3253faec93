"""The task in training: values before it, its norms' statistics, and all that must not outlive its training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia.models.multi_head import MultiHeadModel, single_task
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_store import finished_tensors
from avalanche_amnesia.optimizers import copied
from avalanche_amnesia.training.update_rules import Adjuster
from avalanche_amnesia.unit_graph.backbones import evaluating


class TaskInTraining:
    """One task from the check of its experience to its commit; made and dropped by the plugin that masks or records.

    Subclasses add what a method needs; an attribute is there from the moment on that the method sets it.

    Args:
        task: its label.

    Attributes:
        snapshot: values before the task; None until its training begins.
        adjuster: holds back updates of what other tasks use.
        guards_others: whether the optimizer moves parameters without a gradient too, so that other tasks' own are put
            back after every step.
    """

    adjuster: Adjuster
    guards_others: bool

    def __init__(self, task: int) -> None:
        self.task = task
        self.snapshot: TaskSnapshot | None = None

    @property
    def before(self) -> TaskSnapshot:
        """Values before the task; a RuntimeError before its training has begun."""
        if self.snapshot is None:
            raise RuntimeError(f"the training of task {self.task} has not begun")
        return self.snapshot


class TaskSnapshot:
    """Copies of all parameters of a model, of the task's own statistics and of the optimizer's state.

    Taken when the task begins. An optimizer that starts afresh with every task has no state by then to be copied.
    What finished tasks have of their own is copied apart: no training moves it, and no trajectory counts it, but a
    plugin of the user's may write there.
    """

    def __init__(self, model: nn.Module, task: int, optimizer: Optimizer) -> None:
        self.task = task
        self.moments = copied(optimizer.state)
        """The optimizer's state, by parameter; emptied when a task goes of which it may hold something."""
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        # Of other tasks' buffers no copy is taken: none of them changes, and one of them may be unlearned meanwhile.
        buffers = dict(model.named_buffers())
        if isinstance(model, TaskMaskedModel):
            buffers = {name: buffers[name] for name in model.buffer_names([task]) if name in buffers}
        elif isinstance(model, MultiHeadModel):  # without masks some may be all tasks'
            of_others = set(model.buffer_names([other for other in model.tasks if other != task]))
            buffers = {name: buffer for name, buffer in buffers.items() if name not in of_others}
        self._statistics = {name: buffer.clone() for name, buffer in buffers.items()}
        self.finished = copied_finished(model)

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put the copied values back into what still exists."""
        optimizer.state = copied(self.moments)
        for name, parameter in model.named_parameters():
            if name in self.values:
                parameter.copy_(self.values[name])
        for name, buffer in model.named_buffers():
            if name in self._statistics:
                buffer.copy_(self._statistics[name])
        self.put_finished_back(model)

    @torch.no_grad()
    def put_finished_back(self, model: nn.Module) -> None:
        """Give finished tasks' own modules the values that they had before the task, whoever wrote there."""
        for name, tensor in finished_tensors(model).items():
            if name in self.finished:
                tensor.copy_(self.finished[name])

    @torch.no_grad()
    def commit(self, parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor]) -> None:
        """Return, bit for bit, every entry that the task does not own."""
        for name, kept in keep.items():
            parameter = parameters[name]
            parameter.copy_(torch.where(kept, parameter, self.values[name]))


def copied_finished(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what finished tasks have of their own, by name."""
    return {name: tensor.detach().clone() for name, tensor in finished_tensors(model).items()}


# What training leaves lags behind the weights where it was short, and mixes the soft masks of every scale with hard
# ones. So statistics are taken again from the tensors that the network was given last, after transforms and
# plugins.
class TaskStatistics:
    """Running statistics of one task's norms (BatchNorm), and the mini-batches that its network saw last."""

    def __init__(self, model: TaskMaskedModel, task: int, n_batches: int) -> None:
        self.model, self.task = model, task
        self.norms = running_norms(model.task_parts(task))
        self._seen: deque[Tensor] = deque(maxlen=n_batches)

    def see(self, x: Tensor, labels: Tensor) -> None:
        """Hold a mini-batch instead of the oldest one."""
        self._seen.append(x if single_task(labels) == self.task else x[labels == self.task])

    def retake(self, parts: nn.Module | None, run: Callable[[Tensor], object]) -> None:
        """Take the statistics of the task's own modules, or of a copy of them, again over these mini-batches."""
        with evaluating(self.model):  # a mini-batch of one sample has no variance
            retake(running_norms(parts), [x for x in self._seen if len(x) > 1], run)


def running_norms(parts: nn.Module | None) -> list[Any]:
    """Norms among a task's own modules that have running statistics."""
    modules = [] if parts is None else parts.modules()
    return [norm for norm in modules if getattr(norm, "running_mean", None) is not None]


def retake(norms: Sequence[Any], batches: Iterable[Tensor], run: Callable[[Tensor], object]) -> None:
    """Set each statistic to its plain average over the mini-batches, through the binary mask, without dropout."""
    # Only the norms train: all else stays in evaluation mode, so that they see what they will see in testing. All of
    # them in one pass: a norm in training normalises by its batch, so those behind it read no stale statistic of it.
    momenta = [norm.momentum for norm in norms]
    hooks = [norm.register_forward_pre_hook(_plain_average()) for norm in norms]
    for norm in norms:
        norm.training = True
    for x in batches:
        run(x)
    for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
        norm.momentum, norm.training = momentum, False
        hook.remove()


def _plain_average() -> Callable[[nn.Module, Any], None]:
    """A hook that weighs the n-th call of a norm with 1/n: the first replaces what was there."""
    calls = 0

    def weigh(norm: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        norm.momentum = 1 / calls

    return weigh
