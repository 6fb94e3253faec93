"""Metrics and references say at once what they can't measure with."""

from functools import partial

import pytest
import torch
from support import strategies

from avalanche_amnesia.benchmarks import SplitDigits, with_unlearning
from avalanche_amnesia.evaluation import (
    References,
    accuracy_difference_metrics,
    jsd_metrics,
    unlearned_accuracy_metrics,
)
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.training import HAT

BENCHMARK = SplitDigits(n_train=200, n_test=100)
make = partial(strategies.make, HAT)


@pytest.mark.parametrize("metrics", [jsd_metrics, accuracy_difference_metrics])
@pytest.mark.parametrize("references", [None, BENCHMARK, make, References], ids=["none", "benchmark", "maker", "class"])
def test_metrics_of_a_comparison_need_references(metrics, references):
    with pytest.raises(TypeError, match=r"references must be an object of References, got .*: References\(make_strat"):
        metrics(references)


@pytest.mark.parametrize("benchmark", [None, [1], make])
def test_old_heads_are_tried_on_a_benchmark(benchmark):
    with pytest.raises(TypeError, match=r"the first argument is the benchmark: unlearned_accuracy_metrics\(benchmark"):
        unlearned_accuracy_metrics(benchmark)


def test_beside_old_heads_stand_references_or_nothing():
    assert len(unlearned_accuracy_metrics(BENCHMARK)) == 1
    with pytest.raises(TypeError, match="references must be an object of References, got 'x'"):
        unlearned_accuracy_metrics(BENCHMARK, "x")


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (lambda: make(), r"the first argument is a HAT, not what makes one: give a function, def make_strategy\(\*\*"),
        (lambda: 3, r"make_strategy=3 can't be called: give a function"),
        (lambda: lambda: make(), r"can't be called with evaluator=… \(.*'evaluator'\): give a function"),
        (lambda: HAT, r"can't be called with evaluator=… \(missing a required argument: 'model'\): give a function"),
        (lambda: lambda **options: None, "make_strategy must return a strategy, and returned None"),
        (lambda: lambda **options: HAT, "make_strategy must return a strategy, and returned <class"),
    ],
    ids=["a strategy", "a number", "no options", "a class", "nothing", "returns a class"],
)
def test_references_are_made_by_a_function_of_options(maker, message):
    given, drawn = maker(), torch.get_rng_state()
    with pytest.raises(ReferencesError, match=message):
        References(given, BENCHMARK)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("benchmark", [None, [1, 2], BENCHMARK.train_stream], ids=["none", "numbers", "stream"])
def test_what_is_no_benchmark_carries_no_requests_and_no_references(benchmark):
    with pytest.raises(TypeError, match="with_unlearning takes a benchmark, such as SplitDigits"):
        with_unlearning(benchmark)
    with pytest.raises(ReferencesError, match="the second argument is the benchmark of the run, got"):
        References(make, benchmark)
