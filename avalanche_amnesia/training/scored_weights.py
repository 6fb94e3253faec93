"""Settings of the masks over weights that winning subnetworks learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from avalanche_amnesia import checks

ScoresRule = Literal["keep", "redraw"]
ScoreInit = Literal["fan_in", "normal", "positive"]
KeepRule = Literal["last", "best"]


@dataclass(frozen=True, kw_only=True)
class ScoredWeights:
    """Settings of learning which weights a task uses, ``masks=ScoredWeights(…)``.

    Args:
        scores: ``keep``: a task's scores start where the last remaining task's ended, as in the paper (the masks of
            successive tasks resemble each other and compress well); ``redraw``: every task draws its own.
        score_bits: bits that are kept of a score for later tasks, 1 to 8: its place in the ranking of its layer, whose
            first bit is the task's mask; the next task starts from scores in these places. By default they are kept as
            they are, 32 bits each for every task that may be unlearned. Not allowed with ``redraw``.
        score_init: what scores are drawn from: ``fan_in`` U(−1/√n, 1/√n) for the ``n`` inputs of a layer's unit, as
            Linear and Conv draw weights; ``normal`` N(0, 1); ``positive`` U(0, 1). Only the ranking within a tensor
            counts, so that wider draws mean nothing but smaller steps: give ``score_lr`` in proportion.
        score_lr: learning rate of the scores, above 0. An Adam of their own steps them, new for every task, whatever
            the strategy's optimizer: what counts is their ranking, and plain SGD at a rate that suits the weights
            leaves it nearly as it was, so that later tasks get no weights to train. The rate follows a schedule of the
            strategy's learning rate within the task, in proportion.
        score_optimizer: makes another optimizer from ``[scores]``; it is left alone.
        keep: ``last``: the state after the last step; ``best``: that of the epoch with the highest accuracy (then the
            lowest loss) on held out data. Weights, masked biases, scores, normalisation and head are always those of
            one and the same step.
        validation_share: share in (0, 1) of each task's training data that ``best`` holds out; 0.1 by default. Not
            allowed with ``last``.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            its training samples through its final mask.

    Raises:
        ValueError: for a value that is not allowed.
        TypeError: for a ``score_optimizer`` that can't be called.

    Reference: Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
    """

    scores: ScoresRule = "keep"
    score_bits: int | None = None
    score_init: ScoreInit = "fan_in"
    score_lr: float = 1e-3
    score_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    keep: KeepRule = "last"
    validation_share: float | None = None
    fit_head: bool = False

    def __post_init__(self) -> None:
        checks.one_of("scores", self.scores, ScoresRule)
        checks.one_of("score_init", self.score_init, ScoreInit)
        checks.one_of("keep", self.keep, KeepRule)
        checks.above("score_lr", self.score_lr, 0)
        bits, share = self.score_bits, self.validation_share
        if bits is not None and checks.integer(bits) not in range(1, 9):
            raise ValueError(f"score_bits must be a whole number from 1 to 8, or None: as they are; got {bits!r}")
        if bits is not None and self.scores != "keep":
            raise ValueError(f"score_bits={bits} has no meaning for scores={self.scores!r}, which keeps none")
        if self.keep == "last" and share is not None:
            raise ValueError(f"validation_share={share} has no meaning for keep='last'; it is what 'best' holds out")
        if share is not None and not 0 < share < 1:
            raise ValueError(f"validation_share must lie in (0, 1), got {share}")
        if self.score_optimizer is not None and not callable(self.score_optimizer):
            raise TypeError(
                f"score_optimizer must make an optimizer from a list of parameters, got {self.score_optimizer!r}: "
                "lambda p: torch.optim.Adam(p, lr=1e-3)"
            )

    @property
    def held_out(self) -> float:
        """Share of a task's training data that is held out."""
        return 0.1 if self.validation_share is None else self.validation_share
