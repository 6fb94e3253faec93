"""Heads fitted to the features that a task ends with."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support.fault_injection import raiser
from support.strategies import trained
from support.strategy_state import bits
from torch import nn
from torch.nn import functional as F

from avalanche_amnesia import HAT, WSN, AmnesiacHAT, HardAttention, MaskedModel, ScoredWeights, SubnetModel
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.training import EVEN_BUDGET, head_fit
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.task_faults import MaskWarning
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import PENALTY, FitError

PERMUTED = PermutedDigits(2, n_train=600, n_test=300)
BUDGET = {"train_mb_size": 10, "train_epochs": 4}
KINDS = [(HAT, MaskedModel), (WSN, SubnetModel), (AmnesiacHAT, MaskedModel)]


MASKS = {WSN: ScoredWeights(), AmnesiacHAT: EVEN_BUDGET}


def learned(kind, wrap, n_tasks=2, **settings):
    masks = replace(MASKS.get(kind, HardAttention()), **settings)
    options = {"hidden": (32,), "wrap": wrap, "optimizer": partial(torch.optim.Adam, lr=3e-3), **BUDGET}
    strategy = trained(n_tasks, PERMUTED, kind=kind, masks=masks, **options)
    strategy.model.eval()
    return strategy


@torch.no_grad()
def loss(model, experience):
    x, y = task_data(experience)
    return float(F.cross_entropy(model(x, experience.task_label), y))


@pytest.mark.parametrize(("kind", "wrap"), KINDS)
def test_fitting_changes_only_the_head_and_improves_it(kind, wrap):
    trained, fitted = (learned(kind, wrap, fit_head=fit_head).model for fit_head in (False, True))
    heads = {name for name in fitted.state_dict() if name.startswith("heads.")}
    before, after = bits(trained), bits(fitted)
    assert {name for name in after if before[name] != after[name]} == heads
    for experience in PERMUTED.test_stream if kind is HAT else []:
        assert loss(fitted, experience) < loss(trained, experience)


def test_a_fitted_head_is_the_logistic_regression_of_scikit_learn():
    model = learned(AmnesiacHAT, MaskedModel, n_tasks=1).model
    x, y = task_data(PERMUTED.train_stream[0])
    features, probabilities = model.features(x, 0).detach(), model(x, 0).softmax(1).detach()
    white = (features - features.mean(0)).double()
    covariance = white.T @ white / len(x)
    floor = (1e-4 * covariance.diagonal().mean() + 1e-9) * torch.eye(len(covariance))
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance + floor), white.T, upper=False).T
    theirs = LogisticRegression(C=1 / PENALTY, tol=1e-8, max_iter=2000).fit(white, y).predict_proba(white)
    assert torch.allclose(probabilities.double(), torch.from_numpy(theirs), atol=0.02)


def test_hat_keeps_its_trained_head_as_published():
    fits = [find_plugin(learned(*kind, n_tasks=0), TaskMaskPlugin).fit_head for kind in KINDS]
    assert fits == [False, True, True]


def test_a_head_that_cant_be_fitted_stays_as_it_was_trained(monkeypatch):
    trained = learned(HAT, MaskedModel)
    monkeypatch.setattr(head_fit, "fitted_head", raiser(FitError))
    with pytest.warns(MaskWarning, match="task 0 keeps the head that it was trained with"):
        kept = learned(HAT, MaskedModel, fit_head=True)
    assert bits(kept.model) == bits(trained.model)


def placed(head, like):
    model = SimpleNamespace(head=lambda task: like)
    return next(value for tensor, value in head.places(model, 0) if tensor.data_ptr() == like.weight.data_ptr())


@pytest.mark.parametrize(("largest", "dtype"), [(3.0, torch.float16), (1e6, torch.float32)])
def test_a_compacted_head_is_the_head_to_half_precision_without_columns_of_closed_units(largest, dtype):
    weight, opened = torch.randn(4, 10), torch.arange(10) % 3 == 0
    weight[:, ~opened] = 0
    weight[0, 0] = largest
    kept = head_fit.compacted(FittedHead(weight, torch.randn(4)))
    assert (kept.weight.shape, kept.weight.dtype, kept.bias.dtype) == ((4, 4), dtype, torch.float16)
    assert torch.equal(kept.columns, opened)
    value = placed(kept, nn.Linear(10, 4))
    assert value.dtype == torch.float32
    assert torch.equal(value, weight.to(dtype).float())
