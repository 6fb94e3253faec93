"""Baseline CLPU-DER++: a main network for tasks never to be unlearned, and a side network for each other task."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.bits import model_hashes
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss, MemoryPlugin, TaskMemory
from avalanche_amnesia.contrib.baselines.networks import SideNetworks
from avalanche_amnesia.optimizers import follow_model
from avalanche_amnesia.seeding import derive_seed, preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training import TrajectoryPlugin, UnlearningPlugin
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.host.rollback import Snapshot
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction


class CLPUPlugin(MemoryPlugin):
    """Avalanche plugin of CLPU-DER++: replays permanent (never unlearned) tasks, and merges their networks into one.

    Arguments and errors are those of :class:`CLPUDERpp`; ``batch_size`` is its ``replay_batch``.
    """

    def __init__(
        self, memory: TaskMemory, loss: DarkLoss, *, merge_steps: int, merge_lr: float, batch_size: int, seed: int
    ) -> None:
        super().__init__(memory, loss)
        checks.above("merge_lr", merge_lr, 0)
        self.seed = checks.whole_number("seed", seed, None)
        self.batch_size = checks.whole_number("batch_size", batch_size)
        self.merge_steps, self.merge_lr = checks.whole_number("merge_steps", merge_steps), merge_lr

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """If the task in training is permanent: add DER++'s loss on samples of earlier permanent tasks to the loss."""
        earlier = set(strategy.model.main_tasks) & set(self.memory.samples)
        if earlier and getattr(strategy.experience, "permanent", False):
            strategy.loss = strategy.loss + self.loss(strategy.model, self.memory.draw(earlier, self.batch_size))

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """After a task's training: store samples of it, and merge side networks of tasks no longer ``unlearnable``."""
        # ``sources=[task]``, because a side network is trained on its task only, and main tasks can't be unlearned.
        self.memory.store(strategy.model, strategy.experience, task, sources=[task])
        self.merge(strategy, unlearnable)

    def covers(self, task: int, removed: Collection[int]) -> bool:
        """Return False: no task ever needs compensation, because unlearning a task leaves all other tasks unchanged."""
        return False

    def compensate(self, model: nn.Module, tasks: Sequence[int], removal: Removal, change: Transaction) -> list[str]:
        """Compensate no task; only delete the stored samples of the unlearned ``tasks``, and return a text about it."""
        return [f"memory: {self.memory.forget(tasks, change)} samples of tasks {sorted(tasks)} dropped"]

    def merge(self, strategy: Strategy, unlearnable: Collection[int]) -> None:
        """Distil the side networks of tasks no longer ``unlearnable`` into the main network, and delete them."""
        model = strategy.model
        for task in [t for t in model.tasks if t not in model.main_tasks and t not in unlearnable]:
            if model.main_tasks:
                model.drop_network(task)
                self._distil(model, task)
            else:  # the first main task: copy its network, as there is none to distil into
                model.backbone.load_state_dict(model.network(task).state_dict())
                model.drop_network(task)
            # Remove the side network's parameters from the optimizer.
            follow_model(strategy, fresh=False)

    def _distil(self, model: SideNetworks, task: int) -> None:
        """Add ``task`` to the main network: train it on stored samples and logits of all tasks without side network."""
        heads = [p for t in model.main_tasks for p in model.head(t).parameters()]
        optimizer = Adam([*model.backbone.parameters(), *heads], lr=self.merge_lr)
        training = model.training
        with preserved_rng():
            torch.manual_seed(derive_seed(self.seed, "merge", task))
            model.train()
            for _ in range(self.merge_steps):
                optimizer.zero_grad()
                self.loss(model, self.memory.draw(model.main_tasks, self.batch_size)).backward()
                optimizer.step()
        optimizer.zero_grad()
        model.train(training)


class CLPUDERpp(TaskStrategy):
    """Strategy CLPU-DER++: permanent tasks (never unlearned) share a main network, each other task trains a copy of it.

    Unlearning a task deletes its copy, called its side network. A task may become permanent later, by declaration or
    by its deadline. Its side network is then distilled into the main one, on samples of all permanent tasks; the
    first one is copied instead. Tasks permanent from the start (``with_unlearning(…, permanent=…)``) have no side
    network. The record calls an unlearning exact as long as no side network has been merged.

    Args:
        model: a :class:`SideNetworks`.
        optimizer: any torch optimizer over ``model.parameters()``.
        memory_per_task: number of samples stored for each task, at least 1.
        logit_weight: α, weight of the squared error to the stored logits.
        label_weight: β, weight of the cross-entropy to the stored labels.
        merge_steps: training steps of a merge, at least 1.
        merge_lr: learning rate of the merge's Adam optimizer, above 0.
        replay_batch: number of stored samples per step.
        unlearning: settings of the unlearning, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: every random draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own options, see :class:`TaskStrategy`.

    Raises:
        TypeError: if ``model`` is not a :class:`SideNetworks`, or for an unknown option.
        ValueError: for an invalid value.

    Reference: Liu et al., Continual learning and private unlearning, CoLLAs 2022.
    """

    def __init__(
        self,
        *,
        model: SideNetworks,
        optimizer: Optimizer,
        memory_per_task: int = 50,
        logit_weight: float = 0.5,
        label_weight: float = 1.0,
        merge_steps: int = 200,
        merge_lr: float = 1e-3,
        replay_batch: int = 64,
        unlearning: UnlearningPlugin | None = None,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        check_model(model, SideNetworks)
        merging: Any = {"merge_steps": merge_steps, "merge_lr": merge_lr, "batch_size": replay_batch, "seed": seed}
        self._networks = CLPUPlugin(TaskMemory(memory_per_task, seed), DarkLoss(logit_weight, label_weight), **merging)
        self._recorder = TrajectoryPlugin()
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        method = [self._networks, self._recorder, obeying]
        super().__init__(model=model, optimizer=optimizer, method=method, seed=seed, **options)

    def mark_permanent(self, tasks: Iterable[int]) -> None:
        """Declare tasks permanent (never unlearned), and merge their side networks into the main network."""
        if self._recorder.snapshot is not None:
            super().mark_permanent(tasks)  # :meth:`CLPUPlugin.prepare` merges them after the training
            return
        plugin = self._unlearning()
        with Transaction() as change:
            change.call(Snapshot(self, complete=True).restore)
            plugin.claims.note_changed_tensors(self.model)
            super().mark_permanent(tasks)
            self._networks.merge(self, plugin.ledger.unlearnable)
            plugin.claims._hashes = model_hashes(self.model)  # the merge is no change by other code
            change.commit()
