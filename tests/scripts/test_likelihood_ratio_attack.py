"""Likelihood-ratio attack on known distributions and on models with and without unlearning."""

import math
from functools import partial
from statistics import mean

import pytest
import torch
from support.strategies import learn, make
from torch.nn.functional import cross_entropy

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.metrics.membership import membership_auc
from avalanche_amnesia.evaluation.probes import copy_probe
from avalanche_amnesia.training import DisjointSubnets
from experiments.likelihood_ratio_attack import likelihood_ratio_attack, likelihood_ratio_audit, margins

STREAM = PermutedDigits(3, n_train=150, n_test=50)


def drawn(shift, of_run=0.0, logistic=False, runs=8, samples=300, seed=0):
    """Draw confidences of three kinds of models without and with shared effects; the first learned the samples."""
    draw = torch.Generator().manual_seed(seed)
    own = torch.randn(3, runs, samples, generator=draw)
    own = torch.special.ndtr(own).logit() if logistic else own
    own = own + of_run * torch.randn(3, runs, 1, generator=draw) + torch.tensor([shift, 0.0, 0.0])[:, None, None]
    return own, own + torch.randn(samples, generator=draw) + torch.randn(runs, 1, generator=draw)


def test_the_attack_separates_two_normal_distributions_optimally():
    found = likelihood_ratio_attack(*drawn(1.0, runs=40)[1][:2])
    assert found.auc == pytest.approx(0.5 + math.erf(0.5) / 2, abs=0.02)  # Φ(1/√2)
    assert 0.03 < found.tpr < 0.1  # Φ(1 − 2.33) = .092, minus the error of means of 39 runs
    assert found.auc_interval[0] < found.auc < found.auc_interval[1]
    assert found.auc_interval[1] - found.auc_interval[0] < 0.1


def test_the_attack_finds_nothing_between_equal_distributions():
    assert likelihood_ratio_attack(*drawn(0.0)[1][:2]).tpr < 0.03
    one = drawn(0.0)[1][0]
    same = likelihood_ratio_attack(one, one)
    assert (same.auc, same.auc_interval, same.tpr, same.tpr_interval) == (0.5, (0.5, 0.5), 0.0, (0.0, 0.0))


LOGISTIC = math.exp(0.87) * (math.exp(0.87) - 1.87) / (math.exp(0.87) - 1) ** 2


@pytest.mark.parametrize(
    ("truth", "shift", "logistic", "of_run"),
    [
        (0.5, 0.0, False, 1.0),
        *((0.64, 0.3585 * math.sqrt(2 * (1 + of**2)), False, of) for of in (0.0, 1.0)),  # Φ(.3585) = .64
        (LOGISTIC, 0.87, True, 0.0),
    ],
)
def test_the_attack_is_neither_biased_nor_too_sure(truth, shift, logistic, of_run):
    found = []
    for seed in range(200):
        own, (learned, never, null) = drawn(shift, of_run, logistic, samples=100, seed=seed)
        # An attacker who knows the shared effects reads the truth in the mean over draws, and tells this draw's luck.
        luck, luck_of_null = (mean(map(membership_auc, -kind, -own[1])) for kind in own[::2])
        attack, floor = likelihood_ratio_attack(learned, never), likelihood_ratio_attack(null, never)
        intervals = (attack.auc_interval, truth), (floor.auc_interval, 0.5), (attack.above(floor)[1], truth - 0.5)
        covered = [low <= true <= high for (low, high), true in intervals]
        found.append([attack.auc - luck, floor.auc - luck_of_null, *covered])
    bias, bias_of_null, *coverage = map(mean, zip(*found, strict=True))
    assert max(abs(bias), abs(bias_of_null)) <= 0.01
    assert min(coverage) >= 0.93


def seeded(seed, **options):
    return make(torch_seed=seed, seed=seed, train_mb_size=15, **options)


disjoint = partial(seeded, kind=DisjointSubnets, hidden=(32,), train_epochs=1)
shared = partial(seeded, hidden=(48,), features=32, train_epochs=4)


def test_margins_are_log_odds_of_the_true_class():
    strategy = learn(shared(0), STREAM.train_stream[:1])
    x, y = STREAM.test_stream[0].tensors
    found = margins(strategy.model, copy_probe(strategy.model, 0), x, y, 0)
    strategy.model.eval()
    p = torch.exp(-cross_entropy(strategy.model(x, 0).detach().double(), y, reduction="none"))
    assert torch.allclose(found, torch.log(p / (1 - p)), atol=1e-3)


def test_the_attack_finds_nothing_after_an_exact_unlearning():
    for options in ({}, {"samples": range(0, 150, 3)}):
        found = likelihood_ratio_audit(disjoint, STREAM, 1, [0, 1, 2], **options)
        assert found.untouched.auc > 0.6  # it could have been found
        assert found.unlearned == found.exact
        assert found.matched.auc == 0.5
        assert found.matched.tpr == 0.0
    assert found.unlearned.samples == 50


def test_the_attack_finds_a_task_that_was_not_unlearned():
    found = likelihood_ratio_audit(shared, STREAM, 1, range(6), most=50)
    assert found.untouched.auc > 0.9
    assert found.untouched.auc_interval[0] > found.retrained.auc_interval[1]
    assert found.unlearned.auc < found.untouched.auc - 0.2
    assert (found.unlearned.runs, found.unlearned.samples) == (6, 50)
