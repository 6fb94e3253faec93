"""Membership inference by likelihood ratios: infer from its confidence whether a model learned a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.benchmarks.requests import without_requests
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.evaluation.bases import by_task_label
from avalanche_amnesia.evaluation.probes import Probe, copy_probe, features_of
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin


@dataclass(frozen=True)
class LikelihoodRatio:
    """Success of an attack that separates two kinds of models by their confidence in single samples.

    Attributes:
        auc: area under the ROC curve, in [0, 1], mean over held-out pairs; .5 if the attack finds nothing, below .5 if
            the models that may have learned the samples are less confident.
        auc_interval: confidence interval of ``auc``.
        tpr: true positive rate at the given false positive rate.
        tpr_interval: confidence interval of ``tpr``.
        auc_by_run: AUC of every held-out pair.
        samples: number of attacked samples per model.
    """

    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    tpr_interval: tuple[float, float]
    auc_by_run: tuple[float, ...]
    samples: int

    @property
    def runs(self) -> int:
        """Return the number of pairs of models."""
        return len(self.auc_by_run)

    def above(self, other: LikelihoodRatio, confidence: float = 0.95) -> tuple[float, tuple[float, float]]:
        """Return this AUC minus that of ``other``, an attack against the same models, with a confidence interval."""
        by_run = torch.tensor([self.auc_by_run, other.auc_by_run], dtype=torch.float64)
        return _mean(by_run[0] - by_run[1], confidence)

    def __str__(self) -> str:
        auc, tpr = self.auc_interval, self.tpr_interval
        return f"AUC {self.auc:.3f} ({auc[0]:.3f} to {auc[1]:.3f}), TPR {self.tpr:.3f} ({tpr[0]:.3f} to {tpr[1]:.3f})"


@dataclass(frozen=True)
class LikelihoodRatioAudit:
    """Results of the attack on models that unlearned, and on other models for comparison.

    Each attack except ``matched`` compares its models with the same baseline: models that never saw the unlearned data,
    and had another data order than the main model.

    Attributes:
        unlearned: attack on models that learned and unlearned the data.
        retrained: attack on models that never saw the data, with a third data order: the null, .5 except for chance.
        exact: attack on models that never saw the data, with the main model's data order: the result of an exact
            unlearning. The task's old mask and head depend on this order, which can raise or lower the AUC although no
            trace of the data exists.
        untouched: attack on models before the request: the result if nothing is unlearned.
        matched: ``unlearned`` compared with the models of ``exact``, by an attacker who knows the main model's data
            order: exactly .5 after an exact unlearning. Finds smaller traces, but also effects of a different order.
    """

    unlearned: LikelihoodRatio
    retrained: LikelihoodRatio
    exact: LikelihoodRatio
    untouched: LikelihoodRatio
    matched: LikelihoodRatio


def likelihood_ratio_attack(
    suspected: Tensor, never: Tensor, *, false_positives: float = 0.01, confidence: float = 0.95
) -> LikelihoodRatio:
    """Attack each pair of runs, by the likelihood ratio of two normal distributions fitted to all other runs.

    ``score = ln N(φ; μ⁺, σ⁺) − ln N(φ; μ⁻, σ⁻)``, see :func:`_distributions`. A pair is one run of each kind. Each pair
    is held out once, and only scores of the same pair are compared: scores from other fits have another scale, and
    pooling them gives an AUC below .5 for equal kinds of models. For two equal runs, the AUC is exactly .5.

    Intervals are Student's over runs, because the samples of one model are not independent. The variance accounts for
    the runs that the fits share (1/runs + 1/(runs − 1): Nadeau & Bengio, Inference for the generalization error, 2003).

    Args:
        suspected: confidences φ of the models that may have learned the samples, ``(runs, samples)``, runs ≥ 3.
        never: confidences of the models that never saw the samples, of the same shape and with the same seed per row.
        false_positives: false positive rate at which the true positive rate is measured, in (0, 1).
        confidence: level of the confidence intervals, in (0, 1).

    Raises:
        ValueError: for other shapes, fewer than three runs, or confidences that are not finite.

    Reference: Carlini et al., Membership inference attacks from first principles, S&P 2022; for unlearned against
    retrained models: Hayes et al., Inexact unlearning needs more careful evaluations, 2024 (U-LiRA).
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
    read = []
    for run in range(len(suspected)):
        means, variances = _distributions(torch.cat([both[:, :run], both[:, run + 1 :]], dim=1))
        log = [
            -(both[:, run] - mean).square() / (2 * v) - v.log() / 2 for mean, v in zip(means, variances, strict=True)
        ]
        positive, negative = log[0] - log[1]
        threshold = negative.quantile(1 - false_positives, interpolation="higher")
        read.append((membership_auc(-positive, -negative), float((positive > threshold).double().mean())))
    aucs, tprs = torch.tensor(read, dtype=torch.float64).T
    (auc, auc_interval), (tpr, tpr_interval) = (_mean(values, confidence, (0, 1)) for values in (aucs, tprs))
    return LikelihoodRatio(auc, auc_interval, tpr, tpr_interval, tuple(aucs.tolist()), suspected.shape[1])


def _distributions(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return means ``(2, samples)`` and variances ``(2,)`` of confidences ``(2, runs, samples)``, per kind of model.

    A few runs are too few to estimate the variance of a single sample, or its difference of means. Therefore the
    variances are common to all samples, and the differences are shrunk to their mean, fully if they vary no more than
    by chance. The mean difference counts as positive (learned samples have the higher confidence): an estimated sign
    would reverse the attack in some of the runs.
    """
    runs = both.shape[1]
    means = both.mean(1)
    rest = both - means[:, None]
    shifts = rest.mean(2, keepdim=True)  # one per model: too few for a variance per kind, so both kinds share one
    of_samples = (rest - shifts).square().mean((1, 2)) * runs / (runs - 1)
    variances = of_samples + shifts.square().mean() * runs / (runs - 1)
    difference = means[0] - means[1]
    by_chance = (rest - shifts).diff(dim=0).square().mean() / (runs - 1)
    kept = (1 - by_chance / difference.var(correction=0).clamp(min=1e-12)).clamp(min=0)
    difference = difference.mean().abs() + kept * (difference - difference.mean())
    return means.mean(0) + torch.stack([difference, -difference]) / 2, variances.clamp(min=1e-12)


def _mean(
    values: Tensor, confidence: float, within: tuple[float, float] = (-1, 1)
) -> tuple[float, tuple[float, float]]:
    """Return the mean of ``values``, one per held-out pair, and its confidence interval, clipped to ``within``."""
    runs, mean = len(values), float(values.mean())
    beside = float(stats.t.ppf((1 + confidence) / 2, runs - 1) * values.std() * (1 / runs + 1 / (runs - 1)) ** 0.5)
    return mean, (max(mean - beside, within[0]), min(mean + beside, within[1]))


def margins(model: nn.Module, probe: Probe, x: Tensor, y: Tensor, task: int) -> Tensor:
    """Return each sample's confidence ``ln(p/(1 − p))``, ``p`` for its label, with the mask and head in ``probe``."""
    if probe.head is None:
        raise ValueError("the probe has no head, whose confidence could be read")
    features = features_of(model, x, probe.mask, parts=probe.parts, task=task)
    head = probe.head.cpu()
    with torch.no_grad():
        logits = head(features.to(next(head.parameters()).dtype)).double()
    true = logits.gather(1, y[:, None])[:, 0]
    return true - logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def _in_order(order: str | None, make_strategy: Callable[..., Any], seed: int, **kwargs: Any) -> Any:
    """Return ``make_strategy(seed, …)`` with another data order, named ``order``; None: with the seed's own order."""
    strategy = make_strategy(seed, **kwargs)
    seeding = find_plugin(strategy, SeedingPlugin)
    if order is not None and seeding is not None:  # References raises an error for a strategy without SeedingPlugin
        seeding.order_seed = derive_seed(seeding.order_seed, order)
    return strategy


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
    """Train a stream with several seeds, unlearn one task or samples of it, and attack the resulting models.

    Five models per seed are attacked or compared: before the request, after it, and retrained with three data orders.
    The attacker has the task's mask and head from before the request.

    Args:
        make_strategy: called as ``make_strategy(seed)`` and ``make_strategy(seed, evaluator=…)``; returns a strategy
            that unlearns, with initial values and random numbers from this seed.
        benchmark: benchmark with the tasks; its requests are ignored.
        task: label of the task to unlearn after the last task.
        seeds: at least 3 seeds; 8 are better.
        samples: positions in the task's training data to unlearn, instead of the whole task.
        most: maximum number of samples to attack, evenly spread over the unlearned samples.
        store: argument of :class:`~avalanche_amnesia.evaluation.References`, which trains the retrained models.

    Raises:
        ValueError: fewer than three seeds, or a task or samples that do not exist in the benchmark.
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
    read: dict[str, list[Tensor]] = {name: [] for name in ("untouched", "unlearned", "exact", "never", "retrained")}
    for seed in seeds:
        strategy = make_strategy(seed)
        strategy.train(stream)
        model, probe = strategy.model, copy_probe(strategy.model, task)
        read["untouched"].append(margins(model, probe, x, y, task))
        if samples is None:
            strategy.unlearn([task])
        else:
            strategy.unlearn(task=task, samples=list(samples))
        read["unlearned"].append(margins(model, probe, x, y, task))
        left = [label for label in experiences if samples is not None or label != task]
        for name, order in (("exact", None), ("never", "another order"), ("retrained", "a third order")):
            references = References(partial(_in_order, order, make_strategy, seed), benchmark, store=store)
            beside = references if samples is None else references.without({task: samples})
            read[name].append(margins(beside.reference(left), probe, x, y, task))
    of_runs = {name: torch.stack(rows) for name, rows in read.items()}
    never, matched = of_runs.pop("never"), likelihood_ratio_attack(of_runs["unlearned"], of_runs["exact"])
    found = {name: likelihood_ratio_attack(suspected, never) for name, suspected in of_runs.items()}
    return LikelihoodRatioAudit(**found, matched=matched)
