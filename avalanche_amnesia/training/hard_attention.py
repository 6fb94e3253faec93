"""Settings for learning masks by hard attention (HAT)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.training.hat_formulas import Annealing, EmbeddingInit, SparsityMode

HALF = 0.5
"""Default of ``reuse`` (share of the units in use) and ``warm_up`` (of mini-batches), chosen on validation images."""


@dataclass(frozen=True, kw_only=True)
class HardAttention:
    """Settings for learning a task's mask by hard attention, ``masks=HardAttention(…)``; defaults as in the HAT paper.

    With a ``budget`` all of a layer's units begin open, and the gate closes over the first part of the task
    (``warm_up``). Then the task takes the units of largest embeddings: of the free ones as many as its budget allows
    (rounded down, and at least one if one is free), of the units that other tasks use at most a share of these
    (``reuse``). For the rest of the task the mask is fixed.

    Args:
        budget: share of each layer's free units that a task takes, in (0, 1]; ``even``: 2/(n + 1), if this and n - 1
            further tasks of the stream are to be trained (1/4 without a stream); None: as many as the gate leaves open
            under the regulariser, as published.
        reuse: share of the units in use that a task may read too, in [0, 1]; only with a budget, None: 0.5. The more
            it reuses, the more it gains from earlier tasks, and the more it loses if one of them is unlearned; and the
            fewer units an unlearning frees.
        warm_up: share of the task's mini-batches over which the gate closes, in [0, 1]; only with a budget, None: 0.5.
        sparsity_weight: ``λ >= 0`` of the sparsity regulariser; None: 0.75, and 0 with a budget.
        sparsity: ``original``, ``cross`` or ``quota``.
        s_max: largest scale of the gate, > 1.
        annealing: ``linear`` or ``cosine``, over the mini-batches of each epoch, or of the warm-up.
        embedding_init: ``normal``, ``uniform``, ``positive``, ``negative``, ``last``, ``ones``, ``open`` or ``sparse``
            (a unit begins open with probability 1/T, for the T tasks of the stream); None: ``normal``, and ``open``
            with a budget.
        embedding_lr: learning rate of the mask embeddings, which have a separate optimizer: of the class and settings
            of the strategy's optimizer, without weight decay.
        embedding_optimizer: function from ``[embedding]`` to that optimizer, if the strategy's class can't be reused.
        compensation_clamp: ``c`` of the gradient compensation, in (0, 88], because the cosh of more overflows float32.
        embedding_clamp: embeddings stay within ``±embedding_clamp``.
        min_units: least number of open units of a layer: the strongest ones at the start of each epoch stay open. Under
            a regulariser half of a layer stays open as long as an epoch's mean loss exceeds 0.9 times the first
            mini-batch's loss: otherwise it would close the layers of a hard task in a small network too early.
        statistics_batches: number of last mini-batches, stored during training, from which the running statistics of
            the task's BatchNorm layers are recomputed under its binary mask. 0: keep the statistics of training, which
            lag after few steps and come from soft masks.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            its training samples through its final mask, like the heads of a :class:`CounterfactualPlugin`: the model,
            the full model and the retrained one then differ in their features, not in how well heads fit.

    Raises:
        ValueError: for an invalid value.
        TypeError: for an ``embedding_optimizer`` that can't be called.

    Reference: Serrà et al., ICML 2018; ``cosine``, ``ones``, ``sparse`` and ``quota``: Duan, HAT-CL, 2023.
    """

    budget: float | Literal["even"] | None = None
    reuse: float | None = None
    warm_up: float | None = None
    sparsity_weight: float | None = None
    sparsity: SparsityMode = "original"
    s_max: float = 400.0
    annealing: Annealing = "linear"
    embedding_init: EmbeddingInit | None = None
    embedding_lr: float = 0.05
    embedding_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    compensation_clamp: float = 50.0
    embedding_clamp: float = 6.0
    min_units: int = 1
    statistics_batches: int = 16
    fit_head: bool = False

    def __post_init__(self) -> None:
        checks.one_of("sparsity", self.sparsity, SparsityMode)
        checks.one_of("annealing", self.annealing, Annealing)
        if self.embedding_init is not None:
            checks.one_of("embedding_init", self.embedding_init, EmbeddingInit)
        if self.sparsity_weight is not None:
            checks.above("sparsity_weight", self.sparsity_weight, 0, inclusive=True)
        share = 1.0 if self.budget in ("even", None) else self.budget
        if isinstance(share, str) or not 0 < share <= 1:
            raise ValueError(f"budget must be 'even', a share in (0, 1], or None, got {self.budget!r}")
        for name, given in (("reuse", self.reuse), ("warm_up", self.warm_up)):
            if given is not None:
                checks.within(name, given, "[0, 1]")
            if given is not None and self.budget is None:
                raise ValueError(f"{name}={given} has no meaning without a budget: budget='even', or a share")
        checks.above("s_max", self.s_max, 1)
        for name in ("embedding_lr", "compensation_clamp", "embedding_clamp"):
            checks.above(name, getattr(self, name), 0)
        if self.compensation_clamp > 88:
            raise ValueError(f"compensation_clamp must be at most 88, or cosh overflows: {self.compensation_clamp}")
        maker = self.embedding_optimizer
        if maker is not None and not callable(maker):
            way_out = "lambda p: torch.optim.Adam(p, lr=1e-3)"
            raise TypeError(f"embedding_optimizer must make an optimizer from parameters, got {maker!r}: {way_out}")
        object.__setattr__(self, "min_units", checks.whole_number("min_units", self.min_units))
        whole = checks.whole_number("statistics_batches", self.statistics_batches, 0)
        object.__setattr__(self, "statistics_batches", whole)

    def shares(self, tasks_left: int | None) -> tuple[float, float]:
        """Return which fraction of free units and of already used units a task may take in each layer."""
        # ``tasks_left``: number of tasks in the stream still to be trained, this one included; None: unknown.
        reused = HALF if self.reuse is None else self.reuse
        if self.budget == "even":
            return (0.25 if tasks_left is None else 2 / (tasks_left + 1)), reused
        return (1.0 if self.budget is None else self.budget), reused


EVEN_BUDGET = HardAttention(budget="even", s_max=100.0, embedding_lr=0.02, fit_head=True)
"""Default of AmnesiacHAT: a task takes its share of the free units, so that masks fit two tasks or two hundred.

``dataclasses.replace(EVEN_BUDGET, reuse=0.2)`` changes one setting of it.
"""
