"""Likelihood-ratio attack: each sample's confidence, beside its distributions with and without the unlearned data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.benchmarks.requests import without_requests
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.evaluation.bases import by_task_label
from avalanche_amnesia.evaluation.probes import Probe, features_of, take_probe
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.seeding import derive_seed

_DRAWS = 400
"""Bootstrap samples of runs."""


@dataclass(frozen=True)
class LikelihoodRatio:
    """Success of the attack in telling confidences of two kinds of models apart, sample by sample.

    Attributes:
        auc: area under its ROC curve, in [0, 1]; .5 where it tells nothing.
        auc_interval: confidence interval of ``auc``, by a bootstrap over runs.
        tpr: share of true positives where the share of false ones is at most the one that was given.
        tpr_interval: of ``tpr``, likewise.
        runs: pairs of models.
        samples: attacked in each.
    """

    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    tpr_interval: tuple[float, float]
    runs: int
    samples: int

    def __str__(self) -> str:
        auc, tpr = self.auc_interval, self.tpr_interval
        return f"AUC {self.auc:.3f} ({auc[0]:.3f} to {auc[1]:.3f}), TPR {self.tpr:.3f} ({tpr[0]:.3f} to {tpr[1]:.3f})"


@dataclass(frozen=True)
class LikelihoodRatioAudit:
    """The attack on the model that unlearned, and the two between which it has to be read.

    Attributes:
        unlearned: models that learned and unlearned the data, against those that never saw it.
        retrained: models that never saw it and had another order of their data, against the same: the floor.
        untouched: models before the request, against the same: what the attack finds where nothing is unlearned.
    """

    unlearned: LikelihoodRatio
    retrained: LikelihoodRatio
    untouched: LikelihoodRatio


def likelihood_ratio_attack(
    suspected: Tensor, never: Tensor, *, false_positives: float = 0.01, confidence: float = 0.95, seed: int = 0
) -> LikelihoodRatio:
    """Attack every sample of every run with the likelihood ratio of two normal distributions, fitted to the other runs.

    ``score = ln N(φ; μ⁺, σ⁺) − ln N(φ; μ⁻, σ⁻)``: means are of this sample in the other runs of either kind, deviations
    are of all samples together, as a few runs give none for a single one. Where both kinds of models are equal, all
    scores are 0, and the AUC is exactly .5. Intervals are of runs, as samples in one model depend on each other.

    Args:
        suspected: confidences φ of the models that may have learned the samples, ``(runs, samples)``, runs ≥ 3.
        never: of those that never saw them, of the same shape; a row of both is of one seed.
        false_positives: share at which true positives are counted, in (0, 1).
        confidence: of the intervals, in (0, 1).
        seed: of the bootstrap.

    Raises:
        ValueError: for other shapes, fewer than three runs, or confidences that are not finite.

    Reference: Carlini et al., Membership inference attacks from first principles, S&P 2022; between models that
    unlearned and retrained ones: Hayes et al., Inexact unlearning needs more careful evaluations, 2024 (U-LiRA).
    """
    checks.within("false_positives", false_positives, "(0, 1)")
    checks.within("confidence", confidence, "(0, 1)")
    if suspected.shape != never.shape or suspected.dim() != 2 or len(suspected) < 3 or suspected.shape[1] < 1:
        raise ValueError(
            "expected two tensors (runs, samples) of as many runs, at least 3 (8 are better), and samples, got "
            f"{tuple(suspected.shape)} and {tuple(never.shape)}"
        )
    both = torch.stack([suspected, never]).double()
    if not bool(both.isfinite().all()):
        raise ValueError("confidences must be finite: a model whose logits are not can't be attacked")
    scores = _scores(both)
    draw = np.random.default_rng(derive_seed(seed, "likelihood ratio"))
    runs = len(suspected)
    drawn = [_read(scores[:, draw.integers(runs, size=runs)], false_positives) for _ in range(_DRAWS)]
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    auc, tpr = _read(scores, false_positives)
    low, high = np.quantile(np.array(drawn), tails, axis=0)
    intervals = [(float(low[i]), float(high[i])) for i in range(2)]
    return LikelihoodRatio(auc, intervals[0], tpr, intervals[1], runs, suspected.shape[1])


def _scores(both: Tensor) -> Tensor:
    """Scores ``(2, runs, samples)`` of confidences of both kinds: each run's by the others of either kind."""
    runs = both.shape[1]
    totals = both.sum(1, keepdim=True)
    means = (totals - both) / (runs - 1)  # of every run left out: (kind, runs, samples)
    squares = (both.square().sum(1, keepdim=True) - both.square()) / (runs - 1)
    variances = ((squares - means.square()).mean(2, keepdim=True) * (runs - 1) / (runs - 2)).clamp(min=1e-12)
    log = [-(both - mean).square() / (2 * v) - v.log() / 2 for mean, v in zip(means, variances, strict=True)]
    return log[0] - log[1]


def _read(scores: Tensor, false_positives: float) -> tuple[float, float]:
    positive, negative = scores.reshape(2, -1)
    threshold = negative.sort().values[min(len(negative) - 1, int(np.ceil((1 - false_positives) * len(negative))))]
    return membership_auc(-positive, -negative), float((positive > threshold).float().mean())


def margins(model: nn.Module, probe: Probe, x: Tensor, y: Tensor, task: int) -> Tensor:
    """Confidence of a model in the labels of samples, through a task's kept mask and head: ``ln(p/(1 − p))``."""
    if probe.head is None:
        raise ValueError("the probe has no head, whose confidence could be read")
    features = features_of(model, x, probe.mask, parts=probe.parts, task=task)
    head = probe.head.cpu()
    with torch.no_grad():
        logits = head(features.to(next(head.parameters()).dtype)).double()
    true = logits.gather(1, y[:, None])[:, 0]
    return true - logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def likelihood_ratio_audit(
    make_strategy: Callable[..., Any],
    benchmark: Any,
    task: int,
    seeds: Sequence[int],
    *,
    samples: Sequence[int] | None = None,
    most: int = 500,
    store: Any = None,
) -> LikelihoodRatioAudit:
    """Learn a stream under several seeds, unlearn a task or samples of it, and attack what is left.

    Of every seed four models are read: before the request, after it, retrained, and retrained with another order of the
    data. The attacker has the task's mask and head, as the model had them before the request.

    Args:
        make_strategy: called as ``make_strategy(seed)`` and ``make_strategy(seed, evaluator=…)``; returns a strategy
            that unlearns, with initial values and draws of this seed.
        benchmark: tasks; its requests are ignored.
        task: to unlearn after the last one.
        seeds: at least 3; 8 are better.
        samples: positions in the task's training data, to unlearn in the place of all of it.
        most: samples to attack, evenly spread over those that are unlearned.
        store: as of :class:`~avalanche_amnesia.evaluation.References`, which trains there.

    Raises:
        ValueError: for fewer than three seeds, or a task or samples that the benchmark does not have.
    """
    stream = without_requests(benchmark).train_stream
    experiences = by_task_label(stream)
    if task not in experiences or len(set(seeds)) < 3:
        raise ValueError(
            f"task must be one of {sorted(experiences)}, and seeds at least three different numbers; got {task!r} and "
            f"{list(seeds)}"
        )
    size = len(experiences[task].dataset)
    positions = checks.integers("samples", range(size) if samples is None else samples, "positions")
    if not positions or not 0 <= min(positions) <= max(positions) < size:
        raise ValueError(
            f"samples must be positions in the {size} training samples of task {task}, from 0; got {samples}"
        )
    gone = torch.tensor(sorted(positions))
    x, y = task_data(experiences[task], gone[torch.linspace(0, len(gone) - 1, min(most, len(gone))).long()])
    read: dict[str, list[Tensor]] = {"untouched": [], "unlearned": [], "retrained": [], "never": []}
    for seed in seeds:
        strategy = make_strategy(seed)
        strategy.train(stream)
        model, probe = strategy.model, take_probe(strategy.model, task)
        read["untouched"].append(margins(model, probe, x, y, task))
        if samples is None:
            strategy.unlearn([task])
        else:
            strategy.unlearn(task=task, samples=list(samples))
        read["unlearned"].append(margins(model, probe, x, y, task))
        references = References(partial(make_strategy, seed), benchmark, store=store)
        left = [label for label in experiences if samples is not None or label != task]
        beside = references if samples is None else references.without({task: samples})
        for name, variant in (("never", "same"), ("retrained", "order")):
            read[name].append(margins(beside.reference(left, variant), probe, x, y, task))  # type: ignore[arg-type]
    of_runs = {name: torch.stack(rows) for name, rows in read.items()}
    never = of_runs.pop("never")
    return LikelihoodRatioAudit(**{name: likelihood_ratio_attack(found, never) for name, found in of_runs.items()})
