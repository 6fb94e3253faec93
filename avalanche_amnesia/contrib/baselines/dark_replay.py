"""DER++ as a plugin: dark experience replay over tasks with heads of their own."""

from typing import Any

from avalanche_amnesia import checks
from avalanche_amnesia.contrib.replay_memory import DarkLoss, MemoryPlugin, TaskMemory
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.plugins.task_mask import single_task
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import register_purger


class DarkReplayPlugin(MemoryPlugin):
    """Adds DER++'s loss on a batch of earlier tasks' samples to every step; makes DER++ of ``Naive``.

    Avalanche's own DER asks the model for logits without task labels, which one with a head per task can't give.

    Args:
        memory_per_task: samples kept of each task, at least 1.
        batch_size: samples of memory per step; by default the strategy's ``train_mb_size``.
        logit_weight: α, of the squared error to the logits in memory.
        label_weight: β, of the cross-entropy to their labels.
        seed: the choice of samples derives from it and the task.

    Attributes:
        memory: the samples.

    Raises:
        ValueError: for a value that is not allowed.

    Reference: Buzzega et al., Dark experience for general continual learning, NeurIPS 2020.
    """

    def __init__(
        self,
        *,
        memory_per_task: int = 50,
        batch_size: int | None = None,
        logit_weight: float = 0.5,
        label_weight: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(TaskMemory(memory_per_task, seed), DarkLoss(logit_weight, label_weight))
        self.batch_size = None if batch_size is None else checks.whole_number("batch_size", batch_size)

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Add the loss on memory."""
        if self.memory.samples:
            batch = self.memory.draw(self.memory.samples, self.batch_size or strategy.train_mb_size)
            strategy.loss = strategy.loss + self.loss(strategy.model, batch)

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Keep samples of the task."""
        self.memory.store(strategy.model, strategy.experience, single_task(strategy.experience))


@register_purger(DarkReplayPlugin)
def _purge(plugin: Any, context: UnlearningContext, change: Transaction) -> str:
    return f"dark replay: {plugin.memory.forget(context.tasks, change)} samples of the tasks dropped, with their logits"
