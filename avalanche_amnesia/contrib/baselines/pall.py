"""Baseline PALL: a subnetwork per task; unlearning resets its weights, and fine-tunes those used by other tasks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss, TaskMemory
from avalanche_amnesia.models.subnet import SubnetModel
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training import TrajectoryPlugin, UnlearningPlugin
from avalanche_amnesia.training.plugins.wsn import ScoredWeights, SubnetPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.trajectory.sparse import union_of
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import evaluation_mode

_REPAIR_BATCH = 64


class PALLPlugin(SubnetPlugin):
    """Avalanche plugin of PALL: redraws weight scores and unused weights before a task; fine-tunes after unlearning.

    Arguments and errors are those of :class:`PALL`; ``store`` is the trajectory: the updates of tasks and repairs.
    """

    def __init__(
        self,
        memory: TaskMemory,
        loss: DarkLoss,
        store: Trajectory,
        *,
        repair_steps: int,
        repair_lr: float,
        score_lr: float,
        seed: int,
    ) -> None:
        super().__init__(masks=ScoredWeights(scores="redraw", score_lr=score_lr, fit_head=False), seed=seed)
        checks.above("repair_lr", repair_lr, 0)
        self.memory, self.loss, self.store = memory, loss, store
        self.repair_steps = checks.whole_number("repair_steps", repair_steps, 0)
        self.repair_lr = repair_lr

    def state(self) -> dict[str, Any]:
        """Return the state to save: masks and samples; :class:`TrajectoryPlugin` saves the recorded updates."""
        return {"masks": super().state(), "memory": self.memory.state()}

    def load_state(self, state: Any) -> None:
        """Load a saved state: masks and samples."""
        masks, memory = checked(state, masks=dict, memory=dict)
        super().load_state(masks)
        self.memory.load_state(memory)

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: prepare its mask, and initialise all weights again that no task uses."""
        super().before_training_exp(strategy, **kwargs)
        model = self.model_of(strategy)
        drawn = model.by_layer(self._draw_scores(model, "weights", model.current_task))
        parameters = dict(model.backbone.named_parameters())
        with torch.no_grad():
            for name, fresh in drawn.items():
                weight, covered = parameters[name], self.in_training.adjuster.use.covered[name]
                weight.copy_(torch.where(covered > 0, weight, fresh.to(weight).view_as(weight)))

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """After a task's training: store samples of the task."""
        # ``sources=[task]``: as published, an unlearning of other tasks does not drop these logits.
        self.memory.store(strategy.model, strategy.experience, task, sources=[task])

    def covers(self, task: int, removed: Collection[int]) -> bool:
        """Return True if ``task`` can be fine-tuned: its samples are stored, and ``repair_steps`` is above 0."""
        return self.repair_steps > 0 and task in self.memory.samples

    def compensate(self, model: SubnetModel, tasks: Sequence[int], removal: Removal, change: Transaction) -> list[str]:
        """Delete samples of unlearned ``tasks``; fine-tune reset weights that other tasks use; return lines of text."""
        lines = [f"memory: {self.memory.forget(tasks, change)} samples of tasks {sorted(tasks)} dropped"]
        shared, readers = self._shared_entries(model, removal.written_entries())
        if not readers or not self.repair_steps:
            return lines
        parameters = {name: p for name, p in model.named_parameters() if name in shared}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for name, parameter in parameters.items():
            change.call(parameter.data.copy_, before[name])
        self._fine_tune(model, parameters, shared, readers, tasks)
        self.store.record_repair(before, parameters, readers)
        if self.snapshot is not None:  # a task is in training: its update is relative to the repaired values
            for name, parameter in parameters.items():
                self.snapshot.values[name] = torch.where(shared[name], parameter.detach(), self.snapshot.values[name])
        n = sum(int(where.sum()) for where in shared.values())
        return [*lines, f"{n} reset weights fine-tuned for {self.repair_steps} steps on memory of tasks {readers}"]

    def _shared_entries(self, model: SubnetModel, reset: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
        """Return (masks, tasks): masks, by parameter name, of the reset weights used by tasks with stored samples."""
        readers = {}
        for task in model.masks:
            use = model.entries_of(task)
            reads = {name: where.to(use[name].device) & use[name] for name, where in reset.items()}
            if task in self.memory.samples and any(bool(where.any()) for where in reads.values()):
                readers[task] = reads
        return {name: where for name, where in union_of(readers.values()).items() if bool(where.any())}, list(readers)

    def _fine_tune(
        self,
        model: SubnetModel,
        parameters: Mapping[str, nn.Parameter],
        shared: Mapping[str, Tensor],
        readers: Collection[int],
        removed: Collection[int],
    ) -> None:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "repair", *sorted(removed)))
        optimizer = Adam(parameters.values(), lr=self.repair_lr)  # new, so entries with gradient 0 do not move
        with evaluation_mode(model), torch.enable_grad():
            for _ in range(self.repair_steps):
                loss = self.loss(model, self.memory.draw(readers, _REPAIR_BATCH, generator))
                gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient * shared[name]
                optimizer.step()
        optimizer.zero_grad()


class PALL(TaskStrategy):
    """Strategy PALL (privacy-aware lifelong learning): one subnetwork per task; unlearning resets a task's weights.

    Before each task, scores and free weights are drawn. The task uses the best-scored weights of every layer, and
    trains the free ones among them. Unlearning resets every weight trained by the task, or by a repair with its
    samples. Reset weights used by remaining tasks are fine-tuned on samples of these tasks (DER++'s loss). The record
    says "approximate" if later tasks remain, because their weights were trained together with the unlearned ones.

    Args:
        model: a :class:`SubnetModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        memory_per_task: number of samples stored for each task, at least 1.
        logit_weight: α, weight of the squared error to the stored logits, at least 0, and not 0 if β is.
        label_weight: β, weight of the cross-entropy to the stored labels, at least 0.
        repair_steps: fine-tuning steps after an unlearning, at least 0.
        repair_lr: learning rate of the fine-tuning's Adam optimizer, above 0.
        score_lr: learning rate of the scores.
        seed: every random draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own options, see :class:`TaskStrategy`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an invalid value.

    Reference: Özdenizci et al., Privacy-aware lifelong learning, ICLR 2025.
    """

    def __init__(
        self,
        *,
        model: SubnetModel,
        optimizer: Optimizer,
        memory_per_task: int = 50,
        logit_weight: float = 0.5,
        label_weight: float = 0.5,
        repair_steps: int = 50,
        repair_lr: float = 1e-2,
        score_lr: float = 1e-3,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        recorder = TrajectoryPlugin()
        numbers: Any = {"repair_steps": repair_steps, "repair_lr": repair_lr, "score_lr": score_lr, "seed": seed}
        memory, loss = TaskMemory(memory_per_task, seed), DarkLoss(logit_weight, label_weight)
        masking = PALLPlugin(memory, loss, recorder.trajectory, **numbers)
        # deletion="updates": reset all weights trained by the task, even if remaining tasks use them.
        method = [masking, recorder, UnlearningPlugin(deletion="updates")]
        super().__init__(model=model, optimizer=optimizer, method=method, seed=seed, **options)
