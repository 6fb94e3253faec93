"""Running statistics of a task's norms, taken again when its training is over."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import single_task
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.unit_graph.backbones import evaluating


# Statistics of training lag after few steps, and mix the soft masks of every scale with hard ones. So statistics
# are taken again from the last inputs of the network, after transforms and plugins.
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
    # Only the norms train: all else stays in evaluation mode, so that they see the inputs of testing. All of
    # them in one pass: a norm in training normalises by its batch, so later norms read no stale statistic.
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
    """Return a hook that weighs the n-th call of a norm with 1/n; the first replaces the old statistics."""
    calls = 0

    def weigh(norm: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        norm.momentum = 1 / calls

    return weigh
