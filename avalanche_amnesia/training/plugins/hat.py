"""HAT as an Avalanche plugin: learns a mask over units for each task, and stores it when the task ends."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import single_task
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.optimizers import BareStep, check_trains_vectors, flush_denormals, sibling_optimizer
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.hard_attention import HALF, HardAttention
from avalanche_amnesia.training.hat_formulas import (
    SparsityRegulariser,
    embedding_gradient,
    initial_embedding,
    mask_scale,
    rescale_embedding_gradient_,
    strongest_units,
    units_within_budget,
)
from avalanche_amnesia.training.norm_statistics import TaskStatistics
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.task_faults import training_samples
from avalanche_amnesia.training.task_in_training import TaskInTraining
from avalanche_amnesia.training.update_rules import AdjustmentRule, as_rule, measure_importance

_MEASURED = 2048
"""Number of samples used to measure the importance of units."""
_FALLEN = 0.9
"""Share of the first mini-batch's loss; a loss above it has hardly fallen. Chosen on Omniglot's validation images."""


class EpochLosses:
    """Sums of losses, to compare an epoch's mean loss with the loss of the task's first mini-batch."""

    # Sums stay on the device: they are read once an epoch.
    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._sum: Tensor | float = 0.0
        self._batches = 0

    def add(self, loss: Tensor) -> None:
        """Add a mini-batch's loss, a scalar, to the epoch's sum; store the first one as the task's first loss."""
        if self._first is None:
            self._first = loss.clone()
        self._sum = self._sum + loss
        self._batches += 1

    def end_epoch(self) -> bool:
        """End an epoch; return True if the loss has hardly fallen: its mean exceeds 0.9 times the task's first loss."""
        if self._first is None or not self._batches:
            return False
        mean, first = float(self._sum) / self._batches, float(self._first)
        self._sum, self._batches = 0.0, 0
        return 0 < _FALLEN * first < mean


class HATTask(TaskInTraining):
    """State of a task in training whose mask is learned by hard attention."""

    embedding: nn.Parameter
    statistics: TaskStatistics
    step_embedding: BareStep
    regulariser: SparsityRegulariser
    generation: int
    scale: float
    gate: Tensor
    lowest: Tensor
    highest: Tensor
    losses: EpochLosses
    tasks_left: int | None
    warm_up: int | None = None
    fixed: bool = False


class HATPlugin(TaskMaskPlugin):
    """Plugin for hard attention (HAT): learns and stores a mask per task, protects parameters that earlier tasks use.

    Works with any Avalanche strategy whose model is a :class:`~avalanche_amnesia.models.MaskedModel`.

    Args:
        masks: settings for learning masks; by default those of the HAT paper.
        adjustment: rule that limits updates of earlier tasks' parameters, an
            :class:`~avalanche_amnesia.training.update_rules.AdjustmentRule`, such as ``AdaHATRule(alpha=1e-2)``, or its
            name: ``hat`` (they are frozen), ``adahat``, ``random`` or ``constant``.
        seed: every random draw derives from it and the task.

    Raises:
        ValueError: for an invalid value; before a training, for locks that the stream does not have, and
            if the strategy's optimizer can't be copied for an embedding.
        TypeError: before a training, if ``embedding_optimizer`` returns no optimizer.

    Reference: Serrà et al., ICML 2018; annealing ``cosine``, ``ones``, ``sparse``, ``quota`` and ``locked``: Duan,
    HAT-CL, 2023.
    """

    model_class = MaskedModel
    task_class = HATTask

    def __init__(
        self,
        *,
        masks: HardAttention | None = None,
        adjustment: str | AdjustmentRule = "hat",
        seed: int = 0,
    ) -> None:
        self.masks = checks.object_of("masks", masks, HardAttention, "HardAttention(s_max=100)")
        super().__init__(as_rule(adjustment), checks.whole_number("seed", seed, None), fit_head=self.masks.fit_head)

    # Around a task --------------------------------------------------------------------------------------------

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: check the model, the optimizer's class, and that ``locked`` tasks exist."""
        super().before_train_dataset_adaptation(strategy, **kwargs)
        self.model_of(strategy).check_gradients()
        self._check_locks(strategy.experience, self.model_of(strategy))
        if self.masks.embedding_optimizer is None:
            check_trains_vectors(strategy.optimizer, "embedding_optimizer")

    def _check_locks(self, experience: Any, model: MaskedModel) -> None:
        stream = getattr(experience, "origin_stream", None)
        if self.rule.locked is None or stream is None:
            return
        known = {single_task(other) for other in stream}
        if unknown := sorted({*self.rule.locked} - known - {*model.tasks}):
            raise ValueError(f"locked={list(self.rule.locked)}: the stream has no tasks {unknown}, but {sorted(known)}")

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: create embedding, its optimizer, regulariser and protection of earlier tasks."""
        now: HATTask = self.in_training
        model, task = self.model_of(strategy), single_task(strategy.experience)
        stream = getattr(strategy.experience, "origin_stream", None)
        self.n_tasks = len(stream or [task])
        now.tasks_left = None if stream is None else max(1, self.n_tasks - strategy.experience.current_experience)
        self.take_snapshot(strategy)
        last = model.task_embedding(model.masked_tasks[-1]) if model.masked_tasks else None
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "embedding", task))
        kind = self.masks.embedding_init or ("open" if self.masks.budget is not None else "normal")
        embedding = initial_embedding(kind, model.n_units, generator, last, n_tasks=self.n_tasks)
        now.embedding = model.start_task(task, embedding)
        now.losses = EpochLosses()
        now.statistics = TaskStatistics(model, task, self.masks.statistics_batches)
        if self.masks.embedding_optimizer is None:
            # Decay would pull every embedding to 0, where a unit is neither open nor closed.
            made = sibling_optimizer(strategy.optimizer, [now.embedding], lr=self.masks.embedding_lr, weight_decay=0)
        else:
            made = self.masks.embedding_optimizer([now.embedding])
            way_out = "lambda p: torch.optim.Adam(p, lr=0.05)"
            checks.instance("what embedding_optimizer returns", made, Optimizer, way_out)
        now.step_embedding = BareStep(made)
        self._prepare(strategy)

    def _prepare(self, strategy: Strategy) -> None:
        """Create the regulariser and the adjuster that protects earlier tasks; called again after an unlearning."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        now.generation = model.generation
        use = self.task_use(model)
        weight = self.masks.sparsity_weight
        if weight is None:
            weight = 0.0 if self.masks.budget is not None else 0.75
        now.regulariser = SparsityRegulariser(weight, self.masks.sparsity, use.in_use, model.sizes, self.n_tasks)
        now.adjuster = self.make_adjuster(model, use, strategy)

    @torch.no_grad()
    def before_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an epoch: choose each layer's strongest units; the regulariser can't close them in this epoch."""
        now: HATTask = self.in_training
        if self.masks.budget is not None:
            share = HALF if self.masks.warm_up is None else self.masks.warm_up
            now.warm_up = round(share * (strategy.train_epochs * len(strategy.dataloader)))
        if now.fixed:
            return
        embedding = now.embedding
        now.highest = torch.full_like(embedding, self.masks.embedding_clamp)
        now.lowest = -now.highest
        fewest = self.masks.min_units
        # Otherwise the regulariser closes the layers of a hard task for good, before the loss has fallen.
        half = now.losses.end_epoch() and now.regulariser.weight > 0
        strongest = strongest_units(
            self.model_of(strategy).sizes,
            embedding,
            torch.ones_like(embedding, dtype=torch.bool),
            lambda n: max(n // 2, fewest) if half else fewest,
        )
        now.lowest[strongest] = min(6 / self.masks.s_max, self.masks.embedding_clamp)  # σ(6) at full scale: open
        embedding.clamp_(now.lowest, now.highest)

    @torch.no_grad()
    def _fix_mask(self, model: MaskedModel) -> None:
        """Make the mask binary for the rest of the task: open the strongest free and used units, within budgets."""
        now: HATTask = self.in_training
        use = self.task_use(model)
        embedding = now.embedding.detach()
        new, reused = self.masks.shares(now.tasks_left)
        is_open = units_within_budget(model.sizes, embedding, use.in_use, new, reused, min_units=self.masks.min_units)
        # Far enough from 0 that the gate is 0 or 1.
        size = embedding.abs() + 40 / self.masks.s_max
        now.embedding.copy_(torch.where(is_open, size, -size))
        now.fixed = True

    @torch.no_grad()
    def keep_mask(self, strategy: Strategy) -> None:
        """Store the binary mask, restore entries outside the mask, recompute running statistics, and fit the head."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        if now.warm_up is not None and not now.fixed:  # the training ended early, or the warm-up fills the task
            self._fix_mask(model)
        self.commit(strategy)
        # After the commit: statistics of the committed weights, through the fixed mask.
        now.statistics.recompute(now.statistics.norms, lambda x: model.features(x, now.task))
        model.finish_task()
        self.settle_head(strategy, now.task)
        if self.rule.measure is not None:
            samples = training_samples(strategy, _MEASURED, derive_seed(self.seed, "importance", now.task))
            model.keep_importance(now.task, measure_importance(self.rule.measure, model, now.task, *samples))

    # Around a step --------------------------------------------------------------------------------------------

    def before_forward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the forward pass: compute this step's mask; if a task was unlearned, first update the protection."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        if model.generation != now.generation:
            self._prepare(strategy)
        now.embedding.grad = None  # not sooner: SI reads every gradient after the step
        batch, batches = strategy.clock.train_epoch_iterations, len(strategy.dataloader)
        if now.warm_up is not None:
            batch, batches = strategy.clock.train_exp_iterations, now.warm_up
            if batch >= batches and not now.fixed:
                self._fix_mask(model)
        fixed = now.fixed
        now.scale = self.masks.s_max if fixed else mask_scale(batch, batches, self.masks.s_max, self.masks.annealing)
        now.gate = model.gate.update(now.scale, learns=not fixed)

    def before_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the backward pass: store the mini-batch, to recompute running statistics when the task ends."""
        now: HATTask = self.in_training
        if now.statistics.norms:
            now.statistics.see(strategy)

    @torch.no_grad()
    def before_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the step: add the sparsity penalty to the loss, compute the mask's gradient, protect earlier tasks."""
        now: HATTask = self.in_training
        embedding, gate = now.embedding, now.gate
        if now.regulariser.weight:
            now.losses.add(strategy.loss.detach())
            strategy.loss.detach().add_(now.regulariser(gate))
        sparsity = now.regulariser.layer_sparsities(gate) if now.adjuster.needs_sparsity else []
        self.begin_step(strategy, sparsity)
        if now.fixed:
            return
        of_gate = self.model_of(strategy).gate.gradient().add_(now.regulariser.gradient(gate))
        embedding.grad = embedding_gradient(of_gate, gate, now.scale)
        rescale_embedding_gradient_(
            embedding.grad, embedding, now.scale, self.masks.s_max, self.masks.compensation_clamp
        )

    @torch.no_grad()
    def after_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the optimizer's step: restore protected entries, step the embedding, and clamp it."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        flush_denormals(strategy.optimizer, strategy.clock.train_exp_iterations)
        self.restore_protected_entries(model)
        if not now.fixed:
            now.step_embedding()
            now.embedding.clamp_(now.lowest, now.highest)
