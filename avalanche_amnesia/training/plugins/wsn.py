"""WSN as an Avalanche plugin: learns which weights a task uses, trains free weights and freezes used ones."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import single_task
from avalanche_amnesia.models.subnet import SubnetModel
from avalanche_amnesia.optimizers import BareStep, flush_denormals
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.task_in_training import TaskInTraining
from avalanche_amnesia.training.update_rules import AdjustmentRule

ScoresRule = Literal["keep", "redraw"]


@dataclass(frozen=True, kw_only=True)
class ScoredWeights:
    """Settings for learning scores of weights, ``masks=ScoredWeights(…)``. A task uses the best-scored weights.

    Args:
        scores: ``keep``: a task's scores start where the last remaining task's ended, as in the paper (the masks of
            successive tasks resemble each other and compress well); ``redraw``: every task draws its own.
        score_bits: number of bits, 1 to 8, in which a score is stored for later tasks: its rank in its layer, with the
            task's mask as first bit; the next task starts from scores with these ranks. By default scores are stored
            unchanged, 32 bits each for every task, unless the stream declares the next task permanent, or no task can
            be unlearned. Not allowed with ``redraw``.
        score_lr: learning rate of the scores, above 0. Each task trains its scores with a new Adam, under any
            optimizer of the strategy: plain SGD at a rate that suits the weights hardly changes the ranking, so that
            later tasks would get no weights to train. Within a task, the rate changes in proportion to the strategy's
            learning rate.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            its experience's samples through its final mask. The paper keeps the trained head (False).

    Raises:
        ValueError: for an invalid value.

    Reference: Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
    """

    scores: ScoresRule = "keep"
    score_bits: int | None = None
    score_lr: float = 1e-3
    fit_head: bool = True

    def __post_init__(self) -> None:
        checks.one_of("scores", self.scores, ScoresRule)
        checks.above("score_lr", self.score_lr, 0)
        bits = self.score_bits
        if bits is not None and checks.integer(bits) not in range(1, 9):
            raise ValueError(f"score_bits must be a whole number from 1 to 8, or None: as they are; got {bits!r}")
        if bits is not None and self.scores != "keep":
            raise ValueError(f"score_bits={bits} has no meaning for scores={self.scores!r}, which keeps none")


class SubnetTask(TaskInTraining):
    """State of a task in training that learns one score for each weight."""

    scores: nn.Parameter
    step_scores: BareStep
    first_rate: float | None
    others: tuple[int, ...]
    generation: int


class SubnetPlugin(TaskMaskPlugin):
    """Plugin for winning subnetworks (WSN): a task uses the best-scored weights; earlier tasks' weights are frozen.

    Works with any Avalanche strategy whose model is a :class:`~avalanche_amnesia.models.SubnetModel`. Weights of
    earlier tasks are frozen: after every step of the optimizer they are set back to their bits from before the task,
    also under momentum, weight decay or Adam. When the task ends, weights outside its mask are set back too.

    Args:
        masks: settings of learning which weights a task uses.
        seed: every random draw derives from it and the task.

    Reference: Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
    """

    model_class = SubnetModel
    task_class = SubnetTask

    def __init__(self, *, masks: ScoredWeights | None = None, seed: int = 0) -> None:
        self.masks = checks.object_of("masks", masks, ScoredWeights, "ScoredWeights(score_lr=0.01)")
        super().__init__(AdjustmentRule(), checks.whole_number("seed", seed, None), fit_head=self.masks.fit_head)

    # Around a task --------------------------------------------------------------------------------------------

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: copy the model, create the task's scores and the protection of earlier tasks."""
        now: SubnetTask = self.in_training
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self.take_snapshot(strategy)
        now.scores = model.start_task(task, self._initial_scores(model, task))
        self._prepare(strategy)

    def _prepare(self, strategy: Strategy) -> None:
        """Create the scores' optimizer and the adjuster to protect earlier tasks; called again after an unlearning."""
        now: SubnetTask = self.in_training
        model = self.model_of(strategy)
        now.others, now.generation = model.masked_tasks, model.generation
        now.adjuster = self.make_adjuster(model, self.task_use(model), strategy)
        fused = now.scores.device.type in ("cpu", "cuda")
        now.step_scores = BareStep(torch.optim.Adam([now.scores], lr=self.masks.score_lr, fused=fused))

    def _initial_scores(self, model: SubnetModel, task: int) -> Tensor:
        """Return the initial scores, ``(n_weights,)``: those of the last task not unlearned, or random numbers."""
        last = model.last_scores() if self.masks.scores == "keep" else None
        if last is not None:
            return last
        return self._draw_scores(model, *(("scores",) if self.masks.scores == "keep" else ("scores", task)))

    def _draw_scores(self, model: SubnetModel, *purpose: int | str) -> Tensor:
        """Return random scores, ``(n_weights,)``, from U(−1/√fan_in, 1/√fan_in), seeded by the seed and ``purpose``."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *purpose))
        parts = []
        for tensor in model.graph.layers.values():
            fan_in = tensor.shape[1:].numel() if len(tensor.shape) > 1 else tensor.size
            parts.append((2 * torch.rand(tensor.size, generator=generator) - 1) / max(1, fan_in) ** 0.5)
        return torch.cat(parts)

    def before_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an epoch: scale the scores' learning rate in proportion to the strategy's learning rate."""
        now: SubnetTask = self.in_training
        rate = strategy.optimizer.param_groups[0].get("lr")
        if strategy.clock.train_exp_epochs == 0:
            now.first_rate = rate
        if rate is not None:
            share = float(rate / now.first_rate) if now.first_rate else 1.0
            now.step_scores.optimizer.param_groups[0]["lr"] = self.masks.score_lr * share

    @torch.no_grad()
    def keep_mask(self, strategy: Strategy) -> None:
        """Restore entries outside the mask to their bits before the task, store the mask, and fit the head."""
        now: SubnetTask = self.in_training
        model = self.model_of(strategy)
        self._drop_unlearned_scores(strategy)
        self.commit(strategy)
        model.finish_task(self.masks.scores == "keep", self.masks.score_bits)
        self.settle_head(strategy, now.task)
        # Unlearning this task restores the scores from before it: they are dropped only if it can never be unlearned. A
        # passed deadline is no reason, because a model without the unlearned tasks would still keep the scores.
        never = unlearning_of(strategy) is None or getattr(strategy.experience, "permanent", False)
        model.drop_scores(model.masked_tasks[-2:-1] if never else ())

    # Around a step --------------------------------------------------------------------------------------------

    def _drop_unlearned_scores(self, strategy: Strategy) -> None:
        """If a task was unlearned since the last step: start the scores again, and release the weights it froze."""
        now: SubnetTask = self.in_training
        model = self.model_of(strategy)
        if model.generation == now.generation or model.masked_tasks == now.others:
            return
        if self.masks.scores == "keep":
            now.scores.data.copy_(self._initial_scores(model, now.task))
        self._prepare(strategy)

    def before_forward(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the forward pass: use only the best-scored weights; all other weights count as 0."""
        self._drop_unlearned_scores(strategy)
        self.model_of(strategy).choose_weights()

    def after_forward(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's first forward pass: raise ModelError if the backbone stores state that tasks would share."""
        if strategy.clock.train_exp_iterations == 0:
            self.refuse_shared_state(strategy)

    @torch.no_grad()
    def before_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the optimizer's step: compute the gradients of weights and of their scores; protect earlier tasks."""
        self.model_of(strategy).pass_gradients()
        self.begin_step(strategy)

    @torch.no_grad()
    def after_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the optimizer's step: restore weights of earlier tasks, and let the scores' optimizer take a step."""
        now: SubnetTask = self.in_training
        flush_denormals(strategy.optimizer, strategy.clock.train_exp_iterations)
        self.restore_protected_entries(self.model_of(strategy))
        now.step_scores()
