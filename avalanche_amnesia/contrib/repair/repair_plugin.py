"""Repair: train the tasks affected by an unlearning for a few steps on stored samples."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import RepairSummary
from avalanche_amnesia.benchmarks.data import single_task
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss, MemoryPlugin, Samples, TaskMemory
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.optimizers import sibling_optimizer
from avalanche_amnesia.seeding import derive_seed, preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.norm_statistics import recompute, running_norms
from avalanche_amnesia.training.plugins.task_mask import DivergedError
from avalanche_amnesia.trajectory.removal import reapply_update
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from avalanche_amnesia.unlearning.context import own_parameters


class RepairPlugin(MemoryPlugin):
    """Avalanche plugin that repairs tasks affected by an unlearning: it trains them for a few steps on stored samples.

    A remaining task is affected if it was trained after an unlearned task and uses entries changed by the deletion.
    The repair trains only these tasks' heads and norms, and backbone entries that the deletion changed and only these
    tasks use. It restores all other entries after each step, so they keep their bits under any optimizer. The
    network runs in evaluation mode (no dropout).

    Stored logits come from a model trained on the unlearned task, so they are deleted and computed again by the model
    without it. If no compensation has replaced the head, the running statistics of its norms are estimated again on the
    samples first, and logits are kept only for correctly classified samples. For the misclassified samples, the label
    gets the logits' weight, too.

    The next request first removes the repair, bit for bit; then all affected tasks are repaired again from the same
    samples. Counterfactual heads refer to the backbone without any repair, so they stay valid.

    Needs :class:`TrajectoryPlugin` and :class:`UnlearningPlugin`, and a masked model.

    Args:
        steps: number of steps, each on samples of all repaired tasks; at least 1.
        batch_size: number of samples of each task in a step, at least 1.
        samples_per_task: number of samples stored for each task, at least 1.
        logits: weight of the squared distance to the stored logits (DER++), at least 0.
        labels: weight of the cross-entropy, at least 0, and not 0 if ``logits`` is.
        optimizer: function from a list of parameters to the repair's optimizer; by default one of the class and
            settings of the strategy's optimizer.
        seed: every random draw derives from it and the task.

    Attributes:
        memory: the stored samples.

    Raises:
        ValueError: for an invalid value.
        TypeError: before a training, if the model has no masks.
        DivergedError: during an unlearning, if the steps lead to infinite or NaN values; nothing was changed.

    Reference: DER++: Buzzega et al., Dark Experience for General Continual Learning, NeurIPS 2020.
    """

    def __init__(
        self,
        *,
        steps: int = 50,
        batch_size: int = 32,
        samples_per_task: int = 50,
        logits: float = 0.5,
        labels: float = 0.5,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        seed: int = 0,
    ) -> None:
        samples_per_task = checks.whole_number("samples_per_task", samples_per_task)
        super().__init__(TaskMemory(samples_per_task, seed), DarkLoss(logits, labels))
        self.steps, self.batch_size = checks.whole_number("steps", steps), checks.whole_number("batch_size", batch_size)
        self.seed = checks.whole_number("seed", seed, None)
        self.optimizer = optimizer

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: raise TypeError if the model has no masks."""
        if not isinstance(strategy.model, TaskMaskedModel):
            raise TypeError(f"a repair needs a model with masks, got {type(strategy.model).__name__}")

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: store samples of the task."""
        self.memory.store(strategy.model, strategy.experience, single_task(strategy.experience))

    def repairable(self, model: nn.Module, affected: Sequence[int], tainted: Collection[int]) -> tuple[int, ...]:
        """Return the ``affected`` tasks to repair: those in ``tainted`` (may contain traces) with stored samples."""
        masked = model.masked_tasks if isinstance(model, TaskMaskedModel) else ()
        able = {task for task, samples in self.memory.samples.items() if len(samples)}.intersection(masked, tainted)
        return tuple(task for task in affected if task in able)

    def forget(self, tasks: Collection[int], change: Transaction) -> str:
        """Delete the stored samples of ``tasks``; return a line of text for the unlearning's record."""
        return f"Repair: {self.memory.forget(tasks, change)} samples of the tasks dropped"

    def carry_out(
        self,
        model: TaskMaskedModel,
        optimizer: Optimizer,
        trajectory: Trajectory,
        *,
        tasks: Sequence[int],
        compensated: Collection[int],
        changed: Mapping[str, Tensor],
        before: dict[str, Tensor] | None,
        change: Transaction,
    ) -> RepairSummary:
        """Train ``tasks`` on stored samples, and record their changes in ``trajectory`` so that they can be removed.

        If a task is in training, the repair is made on ``before`` and its changes are added to the current values.
        """
        own = own_parameters(model, *tasks)
        parameters = dict(model.backbone.named_parameters(prefix="backbone"))
        with register_all(model):
            parameters |= {name: model.get_parameter(name) for name in sorted(own)}
            buffers = [model.get_buffer(name) for name in model.buffer_names(tasks)]
        now = {name: p.detach().clone() for name, p in parameters.items()}
        before = {} if before is None else before
        committed = {name: value if name in own else before.get(name, value) for name, value in now.items()}
        for tensor in (*parameters.values(), *buffers):
            change.write(tensor, tensor)  # notes the values, which the repair changes
        change.call(before.update, dict(before))
        for name, value in committed.items():
            parameters[name].copy_(value)
        free = _free_entries(model, tasks, changed)
        steps = self.repair(model, optimizer, tasks, compensated, free)
        moved = {n: p.detach().clone() for n, p in parameters.items() if not same_bits(p.detach(), committed[n]).all()}
        after = moved | {name: committed[name] for name in free.keys() - moved.keys()}
        trajectory.record_repair({name: committed[name] for name in after}, after, free=free)
        for name, value in committed.items():
            parameters[name].copy_(reapply_update(now[name], value, moved[name]) if name in moved else now[name])
        before.update(moved)
        return RepairSummary(
            samples={task: len(self.memory.samples[task]) for task in tasks},
            steps=steps,
            entries={name: int((~same_bits(value, committed[name])).sum()) for name, value in sorted(moved.items())},
        )

    def repair(
        self,
        model: TaskMaskedModel,
        optimizer: Optimizer,
        tasks: Sequence[int],
        compensated: Collection[int],
        free: Mapping[str, Tensor],
    ) -> int:
        """Train the tasks' heads, norms and ``free`` backbone entries on stored samples; return the number of steps."""
        with preserved_rng(), evaluation_mode(model):
            for task in tasks:
                if task in compensated:  # stay close to its head and statistics, which were fitted to far more samples
                    self.memory.refresh_logits(model, task)
                    continue
                self._recompute_statistics(model, task)
                held = self.memory.samples[task]
                if not bool(held.has_logits.any()):  # stay close to the model's output, because labels are few
                    self.memory.refresh_logits(model, task, correct_only=True)
            movable = {model.get_parameter(name): entries for name, entries in free.items()}
            self._train(model, optimizer, tasks, movable)
        return self.steps

    def _recompute_statistics(self, model: TaskMaskedModel, task: int) -> None:
        norms, x = running_norms(model.task_parts(task)), self.memory.samples[task].x
        if norms and len(x) > 1:
            device = next(model.parameters()).device
            batches = [part.to(device) for part in x.split(512) if len(part) > 1]
            recompute(norms, batches, lambda part: model.features(part, task))

    def _train(
        self,
        model: TaskMaskedModel,
        optimizer: Optimizer,
        tasks: Sequence[int],
        movable: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """Run the repair's training steps; ``movable``: backbone parameter → mask of the entries that may change."""
        own = [p for task in tasks for p in model.heads[task].parameters()]
        working = [*movable, *own]
        batches = {task: self._batches(task, self.memory.samples[task]) for task in tasks}
        stepped = sibling_optimizer(optimizer, working) if self.optimizer is None else self.optimizer(working)
        with Transaction() as flags:
            for parameter in dict.fromkeys((*model.parameters(), *working)):
                flags.call(setattr, parameter, "grad", None)
                flags.call(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)
            for parameter in working:
                parameter.requires_grad_(True)
            for _ in range(self.steps):
                with torch.enable_grad():
                    losses = [self.loss(model, {task: next(batches[task])}) for task in tasks]
                    torch.stack(losses).sum().backward()
                start = [parameter.detach().clone() for parameter in working]
                # Weight decay or momentum must not move entries without a gradient (a head's columns outside the mask).
                reached = [torch.zeros_like(p, dtype=torch.bool) if p.grad is None else p.grad != 0 for p in own]
                stepped.step()
                for parameter, old, moves in zip(working, start, [*movable.values(), *reached], strict=True):
                    parameter.data.copy_(torch.where(moves, parameter, old))
                stepped.zero_grad()
        if not all(bool(parameter.isfinite().all()) for parameter in working):
            raise DivergedError(
                f"the repair of tasks {list(tasks)} diverged: some weights are infinite or NaN. Nothing was unlearned "
                "or changed; give it a smaller learning rate, RepairPlugin(optimizer=lambda parameters: …)"
            )

    def _batches(self, task: int, samples: Samples) -> Iterator[Samples]:
        """Yield a task's mini-batches endlessly, in epochs without replacement; draws depend only on (seed, task)."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "repair", task))
        while True:
            for index in torch.randperm(len(samples), generator=generator).split(self.batch_size):
                yield samples.select(index)


def _free_entries(model: TaskMaskedModel, tasks: Sequence[int], changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks, by parameter name, of the ``changed`` backbone entries used by ``tasks`` and by no other task."""
    others = [task for task in model.tasks if task not in tasks and task != model.current_task]
    mine, theirs = ([model.entries_of(task) for task in group] for group in (tasks, others))
    free = {}
    for name in mine[0]:
        if name in changed:
            entries = changed[name] & torch.stack([of[name] for of in mine]).any(0)
            for of in theirs:
                entries = entries & ~of[name]
            if bool(entries.any()):
                free[name] = entries
    return free
