"""CLPU-DER++: permanent tasks in a main network, tasks that may be unlearned in side networks."""

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss, MemoryPlugin, TaskMemory
from avalanche_amnesia.contrib.baselines.networks import SideNetworks
from avalanche_amnesia.optimizers import follow_model
from avalanche_amnesia.seeding import derive_seed, preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction


class CLPUPlugin(MemoryPlugin):
    """Replays permanent tasks into the main network, and merges side networks of tasks that became permanent.

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
        """While a permanent task is trained, add DER++'s loss on the samples of those before it."""
        earlier = set(strategy.model.main_tasks) & set(self.memory.samples)
        if earlier and getattr(strategy.experience, "permanent", False):
            strategy.loss = strategy.loss + self.loss(strategy.model, self.memory.draw(earlier, self.batch_size))

    # Around an unlearning -------------------------------------------------------------------------------------

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Keep samples of a task that has just been trained; merge the tasks whose deadline has come."""
        # A side network knows only its own task; main tasks can't be requested.
        self.memory.store(strategy.model, strategy.experience, task, known=[task])
        self.merge(strategy, unlearnable)

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """No task is ever affected."""
        return False

    def compensate(self, model: nn.Module, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Drop the samples of the tasks that go."""
        return [f"memory: {self.memory.forget(gone, change)} samples of tasks {sorted(gone)} dropped"]

    def merge(self, strategy: Strategy, unlearnable: Collection[int]) -> None:
        """Distil the side networks of tasks that can't be unlearned any more into the main one, and drop them."""
        model = strategy.model
        for task in [t for t in model.tasks if t in model.networks and t not in unlearnable]:
            if model.main_tasks:
                model.drop_network(task)
                self._distil(model, task)
            else:  # nothing is there yet to distil into
                model.backbone.load_state_dict(model.network(task).state_dict())
                model.drop_network(task)
            # The side network's parameters leave the optimizer.
            known, parameters = strategy.optimized_param_id or {}, dict(model.named_parameters())
            follow_model(strategy.optimizer, parameters, known, fresh=False)
            strategy.optimized_param_id = parameters

    def _distil(self, model: SideNetworks, task: int) -> None:
        """Train the main network on the samples of all its tasks, with the logits that they had."""
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
    """Permanent tasks train a main network with DER++; every other task trains a side network, begun from the main one.

    Unlearning a task deletes its side network. Once a task becomes permanent (declared later, or by its deadline) its
    side network is distilled into the main one, on the samples of all permanent tasks; the first one is moved there as
    it is. Tasks that are permanent from the start (``with_unlearning(…, permanent=…)``) have no side network. Records
    call an unlearning exact while no task was merged later.

    Args:
        model: a :class:`SideNetworks`.
        optimizer: any torch optimizer over ``model.parameters()``.
        memory_per_task: samples kept of each task, at least 1.
        logit_weight: α, of the squared error to the logits in memory.
        label_weight: β, of the cross-entropy to their labels.
        merge_steps: training steps of a merge, at least 1.
        merge_lr: learning rate of its Adam, above 0.
        replay_batch: samples of memory per step.
        unlearning: how requests are obeyed, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: every draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own, as of :class:`TaskStrategy`.

    Raises:
        TypeError: if ``model`` is of another kind, or for an unknown option.
        ValueError: for a value that is not allowed.

    Reference: Liu et al., Continual learning and private unlearning, CoLLAs 2022.
    """

    settings: ClassVar = {"unlearning": UnlearningPlugin}

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
        self._networks = CLPUPlugin(
            TaskMemory(memory_per_task, seed),
            DarkLoss(logit_weight, label_weight),
            merge_steps=merge_steps,
            merge_lr=merge_lr,
            batch_size=replay_batch,
            seed=seed,
        )
        self._recorder = TrajectoryPlugin()
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[self._networks, self._recorder, obeying],
            seed=seed,
            **options,
        )

    def mark_permanent(self, tasks: Iterable[int]) -> None:
        """Declare remaining tasks permanent, and merge their side networks; while a task is in training, at its end."""
        super().mark_permanent(tasks)
        if self._recorder.snapshot is None:
            self._networks.merge(self, self._unlearning().ledger.unlearnable)
