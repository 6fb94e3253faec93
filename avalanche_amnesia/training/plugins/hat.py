"""HAT as an Avalanche plugin: the life of a task's mask, and what each training step does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.models.allocation import Isolation, UnitAllocation, UnitAllocator
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.hat_formulas import (
    Annealing,
    EmbeddingInit,
    SparsityMode,
    SparsityRegulariser,
    compensate_,
    embedding_gradient,
    initial_embedding,
    mask_scale,
)
from avalanche_amnesia.training.host.rollback import abort_training, go_back
from avalanche_amnesia.training.norm_statistics import TaskStatistics
from avalanche_amnesia.training.optimizers import BareStep, check_sibling, clear_faint, sibling_optimizer
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin, single_task
from avalanche_amnesia.training.task_in_training import TaskInTraining
from avalanche_amnesia.training.update_rules import AdjustmentRule, AdjustSpace, ConstantRule, RandomRule, TaskUse
from avalanche_amnesia.transaction import Transaction

Adjustment = Literal["hat", "random", "constant"]
IsolationChoice = Literal["none", "pools"]


class HATTask(TaskInTraining):
    """A task in training whose mask is learned by hard attention.

    Attributes:
        allocation: the units that it may use; None: all of them.
        statistics: of its norms, taken again when it ends.
        step_embedding: steps the mask's embedding.
        regulariser: of the mask's sparsity.
        generation: of the model's masks for which the regulariser and the adjuster were made.
        scale: of the gate at this mini-batch.
        gate: of all units at this mini-batch, ``(n_units,)``.
        lowest, highest: bounds of the embedding in this epoch, ``(n_units,)``.
    """

    allocation: UnitAllocation | None
    statistics: TaskStatistics
    step_embedding: BareStep
    regulariser: SparsityRegulariser
    generation: int
    scale: float
    gate: Tensor
    lowest: Tensor
    highest: Tensor

    @property
    def alone(self) -> bool:
        """Whether it has units of its own, where there is nothing to save for others."""
        return self.allocation is not None and self.allocation.alone


class HATPlugin(TaskMaskPlugin):
    """Hard attention to the task: learns a mask per task, protects what earlier masks use, commits what a mask owns.

    Works with any Avalanche strategy whose model is a :class:`~avalanche_amnesia.models.MaskedModel`.

    Args:
        sparsity_weight: ``λ >= 0`` of the sparsity regulariser; None: 0.75, and 0 for a task with a pool of its own.
        sparsity: ``original``, ``cross`` or ``quota``.
        s_max: largest scale of the gate, > 1.
        annealing: ``linear`` or ``cosine``, over the mini-batches of each epoch.
        embedding_init: ``normal``, ``uniform``, ``positive``, ``negative``, ``last``, ``ones`` or ``sparse`` (a unit
            begins open with probability 1/T, for the T tasks of the stream); None: ``normal``, and ``positive`` for
            a task with a pool of its own.
        embedding_lr: learning rate of the mask embeddings; they are stepped by an optimizer of their own, of the
            strategy's optimizer's class and settings, without weight decay.
        embedding_optimizer: makes that optimizer from ``[embedding]``, where the strategy's class can't be reused.
        compensation_clamp: ``c`` of the gradient compensation, in (0, 88]: the cosh of more is no float32.
        embedding_clamp: embeddings stay within ``±embedding_clamp``.
        min_units: a layer never has fewer open units: its strongest ones at the start of each epoch are held open.
        statistics_batches: running statistics of the task's norms (BatchNorm) are taken again at its end, through its
            binary mask, over its last mini-batches, so many of which are held in memory. 0: those that training left,
            which lag behind the weights after few steps, and saw soft masks.
        adjustment: ``hat`` (parameters in use are frozen), ``random`` or ``constant``.
        alpha: rate of ``constant``, in [0, 1]; 1 (no protection) by default. Not allowed with another adjustment.
        adjust: ``update`` (protects under every optimizer) or ``gradient`` (as published: right for plain SGD only).
        locked: labels of the tasks whose masks protect and count as in use: in the regulariser, the adjustment and
            the network's capacity. None: every remaining task. A label may name a task that is still to come, which
            is locked once it is trained; one that the stream does not have is an error before the training. A later
            task may overwrite what only tasks without a lock use, so that their logits change; unlearning that later
            task brings the overwritten values back.
        isolation: units of their own for tasks, which makes unlearning exact to the bit:
            :class:`~avalanche_amnesia.isolation.Pools`, or ``pools`` for its defaults. ``none``: tasks share freely.
        seed: every draw derives from it and the task.

    Raises:
        ValueError: for a value that is not allowed; before a training, for locks that the stream does not have, and
            where no optimizer for an embedding can be made of the strategy's.
        TypeError: for an ``embedding_optimizer`` that can't be called, or returns none.
        CapacityError: before a training, if a task finds no pool of its own.

    Reference: Serrà et al., ICML 2018; annealing ``cosine``, ``ones``, ``sparse``, ``quota`` and ``locked``: Duan,
    HAT-CL, 2023.
    """

    model_class = MaskedModel
    task_class = HATTask

    def __init__(
        self,
        *,
        sparsity_weight: float | None = None,
        sparsity: SparsityMode = "original",
        s_max: float = 400.0,
        annealing: Annealing = "linear",
        embedding_init: EmbeddingInit | None = None,
        embedding_lr: float = 0.05,
        embedding_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        compensation_clamp: float = 50.0,
        embedding_clamp: float = 6.0,
        min_units: int = 1,
        statistics_batches: int = 16,
        adjustment: Adjustment = "hat",
        alpha: float | None = None,
        adjust: AdjustSpace = "update",
        locked: Iterable[int] | None = None,
        isolation: Isolation | IsolationChoice = "none",
        seed: int = 0,
    ) -> None:
        checks.one_of("sparsity", sparsity, SparsityMode)
        checks.one_of("annealing", annealing, Annealing)
        if embedding_init is not None:
            checks.one_of("embedding_init", embedding_init, EmbeddingInit)
        checks.one_of("adjust", adjust, AdjustSpace)
        if sparsity_weight is not None:
            checks.above("sparsity_weight", sparsity_weight, 0, inclusive=True)
        checks.above("s_max", s_max, 1)
        checks.above("embedding_lr", embedding_lr, 0)
        checks.above("compensation_clamp", compensation_clamp, 0)
        checks.above("embedding_clamp", embedding_clamp, 0)
        if compensation_clamp > 88:
            raise ValueError(
                f"compensation_clamp must be at most 88, got {compensation_clamp}: cosh of more overflows float32, and "
                "the embeddings become NaN"
            )
        if embedding_optimizer is not None and not callable(embedding_optimizer):
            raise TypeError(
                f"embedding_optimizer must make an optimizer from a list of parameters, got {embedding_optimizer!r}: "
                "lambda p: torch.optim.Adam(p, lr=0.05)"
            )
        self.sparsity_weight, self.sparsity, self.s_max, self.annealing = (
            sparsity_weight,
            sparsity,
            s_max,
            annealing,
        )
        self.embedding_init, self.embedding_lr, self.embedding_optimizer = (
            embedding_init,
            embedding_lr,
            embedding_optimizer,
        )
        self.compensation_clamp, self.embedding_clamp = compensation_clamp, embedding_clamp
        self.min_units = checks.whole_number("min_units", min_units)
        self.statistics_batches = checks.whole_number("statistics_batches", statistics_batches, 0)
        super().__init__(self._make_rule(adjustment, alpha), adjust, checks.whole_number("seed", seed, None))
        self.locked = None if locked is None else _task_labels("locked", locked)
        self.isolation = isolation_of(isolation)
        self.allocator = UnitAllocator() if self.isolation is None else self.isolation.allocator(self.min_units)
        if self.allocator.isolates:
            _check_isolated(embedding_init, adjust, self.locked)

    def _make_rule(self, adjustment: Adjustment, alpha: float | None) -> AdjustmentRule:
        checks.one_of("adjustment", adjustment, Adjustment)
        if adjustment != "constant" and alpha is not None:
            raise ValueError(
                f"alpha={alpha} has no meaning for adjustment={adjustment!r}; it is the rate of 'constant'"
            )
        if adjustment == "hat":
            return AdjustmentRule()
        return RandomRule() if adjustment == "random" else ConstantRule(1.0 if alpha is None else alpha)

    def task_use(self, model: TaskMaskedModel) -> TaskUse:
        """What a next task would find in use: by the locked tasks, or by all that remain."""
        return TaskUse(model, self.locked)

    # Around a task --------------------------------------------------------------------------------------------

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """As the base class's; check the locks against the stream, and that an embedding can be stepped."""
        super().before_train_dataset_adaptation(strategy, **kwargs)
        self._check_locks(strategy.experience, self.model_of(strategy))
        if self.embedding_optimizer is None:
            check_sibling(strategy.optimizer, "embedding_optimizer")

    def _check_locks(self, experience: Any, model: MaskedModel) -> None:
        stream = getattr(experience, "origin_stream", None)
        if self.locked is None or stream is None:
            return
        known = {single_task(other) for other in stream}
        unknown = sorted(self.locked - known - set(model.tasks))
        if unknown:
            raise ValueError(
                f"locked={sorted(self.locked)}: the stream has no tasks {unknown}, which would protect nothing; it has "
                f"{sorted(known)}"
            )

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Start the task's mask; everything that is constant within the task is computed here."""
        now: HATTask = self.in_training
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self.n_tasks = len(getattr(strategy.experience, "origin_stream", None) or [task])
        now.allocation = self._allocate(strategy, model, task)
        self._take_snapshot(strategy, model, task)
        last = model.task_embedding(tuple(model.masks)[-1]) if model.masks else None
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "embedding", task))
        kind = self.embedding_init or ("positive" if now.alone else "normal")
        embedding = initial_embedding(kind, model.n_units, generator, last, n_tasks=self.n_tasks)
        model.start_task(task, embedding, None if now.allocation is None else now.allocation.allowed)
        now.statistics = TaskStatistics(model, task, self.statistics_batches)
        now.step_embedding = BareStep(self._make_embedding_optimizer(strategy.optimizer, model))
        self._prepare(model)

    def _allocate(self, strategy: Any, model: MaskedModel, task: int) -> UnitAllocation | None:
        """The units that the task may use; None: all of them."""
        self.influences = None
        try:
            allocation = self.allocator.begin(strategy, model, task)
        except ValueError:
            abort_training(strategy)
            raise
        if allocation is not None:
            self.influences = allocation.influences
        return allocation

    def undo_training(self, strategy: Any) -> None:
        """As the base class's; every other task's units lie at their places again."""
        go_back(strategy)
        before = self._before
        self.allocator.recover()
        super().undo_training(strategy)
        self.allocator.end(strategy, self.model_of(strategy), before)

    def at_rest(self, strategy: Any) -> AbstractContextManager[None]:
        """As the base class's: in the middle of a training units may lie elsewhere."""
        return self.allocator.at_rest(strategy, self.model_of(strategy), self._before)

    def rearrange(self, strategy: Any, change: Transaction) -> None:
        """As the base class's: the remaining tasks' units may move."""
        masks = self.model_of(strategy).masks
        change.set(self, opened_whole={task: layers for task, layers in self.opened_whole.items() if task in masks})
        self.allocator.rearrange(strategy, self.model_of(strategy), self._before, change)

    def moved_without(self, strategy: Any, tasks: Sequence[int]) -> tuple[int, ...]:
        """As the base class's."""
        return self.allocator.moved_without(self.model_of(strategy), tasks)

    @property
    def _before(self) -> dict[str, Tensor]:
        """Values before the task in training; empty between tasks."""
        return {} if self.snapshot is None else self.snapshot.values

    def _prepare(self, model: MaskedModel) -> None:
        """Whatever depends on the other tasks' masks; again when one of them goes in the middle of this task."""
        now: HATTask = self.in_training
        now.generation = model.generation
        sizes = [layer.units for layer in model.graph.layers.values()]
        allocation = now.allocation
        use = self.task_use(model) if allocation is None else TaskUse.within(model, allocation)
        weight = (0.0 if now.alone else 0.75) if self.sparsity_weight is None else self.sparsity_weight
        now.regulariser = SparsityRegulariser(weight, self.sparsity, use.in_use, sizes, self.n_tasks)
        now.adjuster = self._make_adjuster(model, use)

    def _make_embedding_optimizer(self, optimizer: Optimizer, model: MaskedModel) -> Optimizer:
        assert model.embedding is not None
        if self.embedding_optimizer is not None:
            made = self.embedding_optimizer([model.embedding])
            checks.instance(
                "what embedding_optimizer returns", made, Optimizer, "lambda p: torch.optim.Adam(p, lr=0.05)"
            )
            return made
        return sibling_optimizer(optimizer, [model.embedding], lr=self.embedding_lr, weight_decay=0)

    @torch.no_grad()
    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        """Choose, per layer, the units that stay open in this epoch whatever the regulariser says."""
        now: HATTask = self.in_training
        embedding = self.model_of(strategy).embedding
        assert embedding is not None
        allocation = now.allocation
        allowed = torch.ones_like(embedding, dtype=torch.bool) if allocation is None else allocation.allowed
        rank = embedding.masked_fill(~allowed, -torch.inf)
        now.highest = torch.full_like(embedding, self.embedding_clamp)
        now.lowest = -now.highest
        start = 0
        for layer in self.model_of(strategy).graph.layers.values():
            part = slice(start, start + layer.units)
            strongest = rank[part].topk(min(self.min_units, int(allowed[part].sum()))).indices
            now.lowest[start + strongest] = min(6 / self.s_max, self.embedding_clamp)  # σ(6) at full scale: open
            start += layer.units
        now.highest[~allowed] = -self.embedding_clamp
        embedding.clamp_(now.lowest, now.highest)

    def written_at_end(self, strategy: Any) -> Iterable[Tensor]:
        """As the base class's: every task's units go to their places again."""
        return self.allocator.written_at_end(self.model_of(strategy), self._before)

    @torch.no_grad()
    def _keep_mask(self, strategy: Any) -> None:
        """Binarise the mask, return every entry outside it to its bits before the task (commit), settle the norms."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        owned = model.graph.parameter_use(model.by_layer(model.binary_mask(now.task)))
        self._commit(strategy, owned)
        now.statistics.retake()
        model.finish_task()
        if now.allocation is not None:
            self._note_opened(model, now.task, now.allocation)
        self.allocator.end(strategy, model, now.before.values)

    def _note_opened(self, model: MaskedModel, task: int, allocation: UnitAllocation) -> None:
        closed = model.by_layer(allocation.allowed & ~model.binary_mask(task))
        self.opened_whole[task] = frozenset(name for name, units in closed.items() if not bool(units.any()))

    # Around a step --------------------------------------------------------------------------------------------

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Open the gate at the mini-batch's scale; look again at the other masks if one of them went."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        assert model.embedding is not None
        model.embedding.grad = None  # not sooner: others (SI) read every gradient behind the step
        batch, batches = strategy.clock.train_epoch_iterations, len(strategy.dataloader)
        now.scale = mask_scale(batch, batches, self.s_max, self.annealing)
        now.gate = model.open_gate(now.scale)
        if model.generation != now.generation:
            self._prepare(model)

    @torch.no_grad()
    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add ``λ·R`` to the loss's value; its gradient is added behind the backward pass, where it is a constant."""
        now: HATTask = self.in_training
        now.statistics.see(strategy.mb_x, strategy.mb_task_id)
        strategy.loss.detach().add_(now.regulariser(now.gate))

    @torch.no_grad()
    def before_update(self, strategy: Any, **kwargs: Any) -> None:
        """Form the embedding's gradient and compensate it; hold back what other tasks use."""
        now: HATTask = self.in_training
        embedding, gate = self.model_of(strategy).embedding, now.gate
        assert embedding is not None
        of_gate = self.model_of(strategy).gate_gradient().add_(now.regulariser.gradient(gate))
        embedding.grad = embedding_gradient(of_gate, gate, now.scale)
        compensate_(embedding.grad, embedding, now.scale, self.s_max, self.compensation_clamp)
        sparsity = now.regulariser.layer_sparsity(gate).tolist() if now.adjuster.needs_sparsity else []
        now.adjuster.before_step(sparsity)

    @torch.no_grad()
    def after_update(self, strategy: Any, **kwargs: Any) -> None:
        """Take back what is held, step the embedding, keep it within its bounds and its layers open."""
        now: HATTask = self.in_training
        model = self.model_of(strategy)
        assert model.embedding is not None
        clear_faint(strategy.optimizer, strategy.clock.train_exp_iterations)
        now.adjuster.after_step()
        self._guard_others(model)
        now.step_embedding()
        model.embedding.clamp_(now.lowest, now.highest)


def isolation_of(given: Isolation | IsolationChoice) -> Isolation | None:
    """Options of an allocation from what a strategy was given; None: tasks share freely.

    Raises:
        ValueError: for a word that is not allowed.
        TypeError: for anything else that makes no allocator.
    """
    if isinstance(given, str):
        checks.one_of("isolation", given, IsolationChoice)
        if given == "none":
            return None
        from avalanche_amnesia.isolation.pools import Pools  # not sooner: who shares freely needs nothing of it

        return Pools()
    if isinstance(given, type) or not hasattr(given, "allocator"):
        raise TypeError(f"isolation must be 'none', 'pools' or Pools(slots=…), got {given!r}")
    return given


def _check_isolated(embedding_init: EmbeddingInit | None, adjust: AdjustSpace, locked: frozenset[int] | None) -> None:
    if embedding_init == "last":
        raise ValueError("embedding_init='last' starts from another task's mask, which isolation= rules out")
    if adjust != "update":
        raise ValueError(f"isolation= holds in update space alone: adjust='update', got {adjust!r}")
    if locked is not None:
        raise ValueError("isolation= protects every remaining task: leave locked out")


def _task_labels(name: str, labels: Iterable[int]) -> frozenset[int]:
    if isinstance(labels, Iterable):
        labels = tuple(labels)
        numbers = [checks.integer(label) for label in labels]
        if all(number is not None and number >= 0 for number in numbers):
            return frozenset(number for number in numbers if number is not None)
    raise ValueError(f"{name} must be task labels (ints of at least 0), e.g. [0, 2], or None; got {labels!r}")
