"""Wrong arguments of metrics and references are refused before anything is trained."""

import inspect
from functools import partial

import pytest
import torch
from support import strategies

from avalanche_amnesia.benchmarks import SplitDigits, with_unlearning
from avalanche_amnesia.contrib.metrics import (
    cost_metrics,
    distance_metrics,
    few_shot_metrics,
    membership_metrics,
    relapse_metrics,
)
from avalanche_amnesia.evaluation import (
    References,
    accuracy_difference_metrics,
    jsd_metrics,
    unlearned_accuracy_metrics,
)
from avalanche_amnesia.evaluation.accuracy_difference import AccuracyDifference
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.training import HAT

BENCHMARK = SplitDigits(n_train=200, n_test=100)
make = partial(strategies.make, HAT)


@pytest.mark.parametrize("helper", [jsd_metrics, accuracy_difference_metrics, distance_metrics, cost_metrics])
def test_metrics_of_a_comparison_need_references(helper):
    for references in (None, BENCHMARK, make, References):
        with pytest.raises(TypeError, match=r"references must be an object of References, got .*: Ref"):
            helper(references)


@pytest.mark.parametrize("helper", [unlearned_accuracy_metrics, relapse_metrics, few_shot_metrics, membership_metrics])
def test_metrics_of_unlearned_tasks_need_the_benchmark(helper):
    assert len(helper(BENCHMARK)) == 1
    for benchmark in (None, [1], make):
        with pytest.raises(TypeError, match=rf"the first argument is the benchmark: {helper.__name__}\(benchmark"):
            helper(benchmark)
    with pytest.raises(TypeError, match="references must be an object of References, got 'x'"):
        helper(BENCHMARK, "x")
    for number in {"samples", "shots"} & set(inspect.signature(helper).parameters):
        with pytest.raises(ValueError, match=f"{number} must be an int of at least 1, got 0"):
            helper(BENCHMARK, **{number: 0})


def test_options_of_metrics_outside_their_lists_are_refused():
    references = References(make, BENCHMARK)
    for call, words in (
        (
            lambda: distance_metrics(references, distances=["jsd"]),
            "distances must be one of 'euclidean', 'cosine'",
        ),
        (lambda: relapse_metrics(BENCHMARK, probe="all"), "probe must be one of 'own', 'remaining', 'none', got 'all'"),
        (
            lambda: distance_metrics(references, scope="none"),
            "scope must be one of 'unlearned', 'remaining', 'all'",
        ),
        (lambda: few_shot_metrics(BENCHMARK, seed=0.5), r"seed must be an int, got 0\.5"),
        (lambda: accuracy_difference_metrics(references, controls=["full"]), "controls must be one of 'heads', 'ref"),
        (lambda: AccuracyDifference(references, samples=0), "samples must be an int of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


MAKERS = [
    (lambda: make(), r"the first argument is a HAT, not what makes one: give a function, def make_strategy\(\*\*"),
    (lambda: 3, r"make_strategy=3 can't be called: give a function"),
    (lambda: lambda: make(), r"can't be called with evaluator=… \(.*'evaluator'\): give a function"),
    (lambda: HAT, r"can't be called with evaluator=… \(missing a required argument: 'model'\): give a function"),
    (lambda: lambda **options: None, "make_strategy must return a strategy, and returned None"),
    (lambda: lambda **options: HAT, "make_strategy must return a strategy, and returned <class"),
]


def test_references_need_a_function_that_makes_strategies():
    for maker, words in MAKERS:
        given, drawn = maker(), torch.get_rng_state()
        with pytest.raises(ReferencesError, match=words):
            References(given, BENCHMARK)
        assert torch.equal(torch.get_rng_state(), drawn)


def test_requests_and_references_need_a_benchmark():
    for benchmark in (None, [1, 2], BENCHMARK.train_stream):
        with pytest.raises(TypeError, match="with_unlearning takes a benchmark, such as SplitDigits"):
            with_unlearning(benchmark)
        with pytest.raises(ReferencesError, match="the second argument is the benchmark of the run, got"):
            References(make, benchmark)
