"""Logistic regressions: the minimum of their loss, on any features, or an error."""

import pytest
import torch
from support.strategies import DIGITS
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.metrics.relapse import linear_probe_accuracy
from avalanche_amnesia.unlearning import logistic
from avalanche_amnesia.unlearning.logistic import FitError, fit_head, largest_errors

TEN_CLASSES = task_data(PermutedDigits(4, n_train=600, n_test=300).train_stream[0])


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_fitted_head_is_the_minimum_of_its_loss(has_bias):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 4
    x = torch.randn(400, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3
    x = x + 2 * torch.randn(4, 6, generator=generator)[y]
    x = x.double()
    weight, bias = fit_head(x, y, 4, penalty=1e-6, iterations=60, has_bias=has_bias)
    assert has_bias or not bias.any()
    found = [weight.requires_grad_(), bias.requires_grad_()][: 1 + has_bias]
    slopes = torch.autograd.grad(F.cross_entropy(F.linear(x, *found), y), found)
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-3


@pytest.mark.parametrize("labels", ["true", "random"])
def test_a_fit_that_stops_early_is_as_good_as_a_long_one(labels):
    x, y = TEN_CLASSES
    x = x.flatten(1)
    x = x[:, x.any(0)]
    if labels == "random":
        y = torch.randint(10, (len(x),), generator=torch.Generator().manual_seed(0))
    covariance = (x - x.mean(0)).T @ (x - x.mean(0)) / len(x)
    covariance += 1e-4 * covariance.diagonal().mean() * torch.eye(len(covariance))

    def loss(weight, bias):
        return F.cross_entropy(F.linear(x, weight, bias), y) + 5 / len(x) * ((weight @ covariance) * weight).sum()

    long = loss(*fit_head(x, y, 10, iterations=200, tolerance=0))
    assert long - 1e-5 < loss(*fit_head(x, y, 10)) < long + 1e-4


@pytest.mark.parametrize(("samples", "width"), [(700, 600), (300, 900)])
def test_only_half_of_a_large_covariance_is_computed(samples, width, monkeypatch):
    x = torch.randn(samples, width, generator=torch.Generator().manual_seed(0)).relu()
    y = torch.arange(samples) % 10
    found, products = {}, {}
    for size in (logistic.BLOCK // 4, 10**9):  # in blocks, and as a whole
        monkeypatch.setattr(logistic, "BLOCK", size)
        with FlopCounterMode(display=False) as counter:
            found[size] = F.linear(x, *fit_head(x, y, 10, iterations=0))
        products[size] = counter.get_total_flops()
    few, whole = products.values()
    assert whole - few > 0.3 * 2 * samples * min(samples, width) ** 2
    assert torch.allclose(*found.values(), atol=1e-4)


@pytest.mark.parametrize("order", ["as drawn", "by class"])
def test_a_fit_that_begins_with_few_samples_equals_one_of_all_samples(order, monkeypatch):
    x, y = TEN_CLASSES
    x = (x.flatten(1) @ torch.randn(64, 12, generator=torch.Generator().manual_seed(0))).relu()
    if order == "by class":
        x, y = x[y.argsort()], y.sort().values
    whole = fit_head(x, y, 10, iterations=200, tolerance=0)
    monkeypatch.setattr(logistic, "FEW", 100)

    def loss(weight, bias):
        return float(F.cross_entropy(F.linear(x, weight, bias), y))

    assert abs(loss(*fit_head(x, y, 10)) - loss(*whole)) < 0.005
    assert loss(*fit_head(x, y, 10, iterations=0)) > loss(*whole) + 0.1  # where those few alone have led


def test_errors_that_are_large_or_among_the_largest_are_found():
    errors = torch.tensor([0.01, 0.5, float("nan"), 0.0, 0.04, 0.03])
    assert largest_errors(errors, 0.02, 2).tolist() == [1, 2, 4, 5]
    assert largest_errors(errors, 0.02, 5).tolist() == [0, 1, 2, 4, 5]
    assert largest_errors(errors, 0.02, 6).tolist() == largest_errors(errors, 0.02, 9).tolist() == list(range(6))


def test_features_that_are_always_zero_and_classes_without_samples_are_allowed():
    x, y = task_data(DIGITS.train_stream[0])
    features = torch.cat([x.flatten(1), torch.zeros(len(x), 5)], 1)
    weight, bias = fit_head(features, y, 4)
    assert weight.isfinite().all()
    assert bias.isfinite().all()
    assert (F.linear(features, weight, bias).argmax(1) == y).double().mean() > 0.9
    assert all(value.isfinite().all() for value in fit_head(torch.zeros(20, 3), torch.arange(20) % 2, 2))


def test_closed_units_have_no_influence_on_a_fit():
    x, y = TEN_CLASSES
    open_ones = x.flatten(1)[:, x.flatten(1).any(0)]
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(200, generator=generator)[: open_ones.shape[1]].sort().values
    features = torch.zeros(len(x), 200).index_copy_(1, places, open_ones)
    weight, bias = fit_head(features, y, 10)
    assert not weight[:, torch.ones(200, dtype=torch.bool).index_fill_(0, places, False)].any()
    # The twin whitens all 200: those that vary by next to nothing have next to no say.
    twin, of_twin = fit_head(features + 1e-7 * torch.randn(features.shape, generator=generator), y, 10)
    assert torch.allclose(F.linear(features, weight, bias), F.linear(features, twin, of_twin), atol=0.02)
    others = torch.randperm(200, generator=generator)[: open_ones.shape[1]].sort().values
    moved, of_moved = fit_head(torch.zeros(len(x), 200).index_copy_(1, others, open_ones), y, 10)
    assert not torch.equal(others, places)
    assert torch.equal(moved[:, others], weight[:, places])
    assert torch.equal(of_moved, bias)


@pytest.mark.parametrize("size", [float("nan"), 1e25])
def test_no_head_is_fitted_to_features_that_overflow(size):
    x, y = DIGITS.train_stream[0].tensors
    features = x.flatten(1).clone()
    features[:, 5] = size * torch.arange(len(x))
    with pytest.raises(FitError):
        fit_head(features, y, 2)


def test_a_head_of_more_features_than_samples_reads_new_samples():
    stream = PermutedDigits(1, n_train=600, n_test=300)
    (x, y), (tx, ty) = (task_data(of[0]) for of in (stream.train_stream, stream.test_stream))
    noise = torch.randn(64, 600, generator=torch.Generator().manual_seed(0))
    x, tx = (torch.relu(part.flatten(1) @ noise) for part in (x, tx))

    def read(**options):
        weight, bias = fit_head(x[:400], y[:400], 10, **options)
        return float(((tx @ weight.T + bias).argmax(1) == ty).double().mean())

    assert read() > read(crowded=0) + 0.02
    many = [fit_head(x[:, :200], y, 10, **options)[0] for options in ({}, {"crowded": 0})]
    assert torch.equal(*many)  # with many samples nothing is added


def test_probes_of_few_samples_are_fitted_as_ever():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 64, generator=generator, dtype=torch.float64), torch.arange(50) % 10
    weight, bias = fit_head(x, y, 10, penalty=10.0, crowded=0)
    found = linear_probe_accuracy(x, y, x, y, penalty=10.0)
    assert found == float(((x @ weight.T + bias).argmax(1) == y).double().mean())
