"""Measuring never changes a training and happens only between tasks; wrong arguments are refused before a training."""

from functools import partial

import pytest
import torch
from avalanche.training import Naive
from support import strategies
from support.measured_runs import BENCHMARK, PERMUTED, TEST, make
from support.strategies import learn, quiet, trained
from support.strategy_state import hashes
from torch.optim import Adam

from avalanche_amnesia import evaluation
from avalanche_amnesia.benchmarks import PermutedDigits, SplitDigits, UnlearningRequest, task_benchmark, with_unlearning
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
from avalanche_amnesia.evaluation.bases import ProbingMetric
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.lab.runs.measuring import metrics_of
from avalanche_amnesia.training import HAT
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin


@pytest.mark.parametrize("helper", [jsd_metrics, accuracy_difference_metrics, distance_metrics, cost_metrics])
def test_metrics_of_a_comparison_need_references(helper):
    for references in (None, BENCHMARK, make, References):
        with pytest.raises(TypeError, match=r"references must be an object of References, got .*: Ref"):
            helper(references)


@pytest.mark.parametrize("helper", [unlearned_accuracy_metrics, relapse_metrics, few_shot_metrics, membership_metrics])
def test_metrics_of_unlearned_tasks_need_the_benchmark(helper):
    assert len(helper(BENCHMARK)) == 1
    for benchmark in (None, [1], make):
        with pytest.raises(TypeError, match=rf"first give the benchmark: {helper.__name__}\(benchmark"):
            helper(benchmark)
    with pytest.raises(TypeError, match="references must be an object of References, got 'x'"):
        helper(BENCHMARK, "x")


def test_options_of_metrics_outside_their_lists_are_refused():
    references = References(make, BENCHMARK)
    for call, words in (
        (lambda: few_shot_metrics(BENCHMARK, shots=0), "shots must be an int of at least 1, got 0"),
        (lambda: distance_metrics(references, noise_floor=["other"]), "noise_floor must be one of 'order', 'seed'"),
        (lambda: accuracy_difference_metrics(references, controls=["full"]), "controls must be one of 'heads', 'ref"),
        (lambda: AccuracyDifference(references, samples=0), "samples must be an int of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


MAKERS = [
    (lambda: make(), r"AmnesiacHAT.*can't be called: give a function, def make_strategy\(\*\*"),
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


SIZES = {"n_train": 60, "n_test": 40}
PLAIN = PermutedDigits(3, **SIZES)
RUN = with_unlearning(PLAIN, {2: [0]}, permanent=[1], deadline=3)
make_small = partial(strategies.make, hidden=(12,), features=8, optimizer=Adam, train_mb_size=20, train_epochs=1)


def inverted():
    """Return the run's tasks with its labels and other pictures."""
    train, test = (stream[0].tensors for stream in (PLAIN.train_stream, PLAIN.test_stream))
    return task_benchmark(train, test, [list(range(10))] * 3, transforms=[lambda x: 1 - x] * 3)


MORE = with_unlearning(PermutedDigits(3, n_train=80, n_test=40), {}, [1], 3)
OTHERS = [
    (lambda: with_unlearning(inverted(), {}, [1], 3), "task 0: the samples of its training data differ"),
    (lambda: with_unlearning(PermutedDigits(3, seed=1, **SIZES), {}, [1], 3), "task 0: the labels of its training"),
    (lambda: MORE, "task 0: 60 training samples in the run, and 80 there"),
    (lambda: with_unlearning(SplitDigits(n_train=60), {}, [1], 3), "task 0: "),
    (lambda: with_unlearning(PLAIN, {}, [1]), "deadline=3 in the run, and deadl"),
    (lambda: with_unlearning(PLAIN, {}, deadline=3), "task 1: permanent=True in the run, and permanent=False there"),
    (lambda: with_unlearning(PermutedDigits(2, **SIZES), {}, [1], 3), r"task 2 is not among their tasks \[0, 1\]"),
]
METRICS = {
    "jsd": lambda references: evaluation.jsd_metrics(references, noise_floor=()),
    "difference": evaluation.accuracy_difference_metrics,
    "accuracy": lambda references: evaluation.unlearned_accuracy_metrics(RUN, references),
}


def test_another_benchmark_is_refused_before_the_first_different_task():
    for number, (other, words) in enumerate(OTHERS):
        for name in METRICS if number == 1 else ["jsd"]:
            strategy = make_small(evaluator=quiet(*METRICS[name](evaluation.References(make_small, other()))))
            with pytest.raises(ReferencesError, match=words) as refused:
                strategy.train(RUN.train_stream)
            assert "References(make_strategy, benchmark) with the benchmark on whose train_stream" in str(refused.value)
            assert strategy.clock.train_iterations in (0, 3, 6)


def test_a_benchmark_made_again_from_the_same_data_is_the_same():
    again = with_unlearning(PermutedDigits(3, **SIZES), {}, permanent=[1], deadline=3)
    references = evaluation.References(make_small, again)
    strategy = make_small(evaluator=quiet(*(metric for of in METRICS.values() for metric in of(references))))
    drawn = torch.get_rng_state()
    learn(strategy, RUN.train_stream)
    assert "JSD_own/eval_phase/test_stream" in strategy.eval(RUN.test_stream)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_random_transforms_are_no_difference():
    class Noisy(torch.utils.data.Dataset):
        targets = [0, 1] * 20

        def __len__(self):
            return 40

        def __getitem__(self, item):
            return torch.full((64,), float(item)) + torch.randn(64), self.targets[item]

    made = [task_benchmark(Noisy(), Noisy(), [[0, 1]]) for _ in range(2)]
    compared = evaluation.accuracy_difference_metrics(evaluation.References(make_small, made[0]))
    strategy = make_small(evaluator=quiet(*compared))
    strategy.train(made[1].train_stream[0])
    assert strategy.clock.train_iterations == 2


def test_metrics_added_after_the_training_compare_the_labels():
    strategy = learn(make_small(), RUN.train_stream)
    late = quiet(*METRICS["jsd"](evaluation.References(make_small, MORE)))
    strategy.plugins[strategy.plugins.index(strategy.evaluator)] = late
    strategy.evaluator = late
    with pytest.raises(ReferencesError, match="other labels, or another number of samples"):
        strategy.eval(RUN.test_stream)


def test_measuring_never_changes_a_training():
    refs = References(make, BENCHMARK)
    measured = make(evaluator=quiet(*metrics_of(BENCHMARK, refs, ["order"])), eval_every=1)
    plain = make()
    requests = [UnlearningRequest((0,), 1, "iteration", 2), UnlearningRequest((1,), 2)]
    stream = with_unlearning(PERMUTED, requests).train_stream
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for experience in stream[:3]:
        measured.train(experience, eval_streams=[TEST])
        measured.eval(TEST)
        plain.train(experience)
    assert hashes(measured.model) == hashes(plain.model)
    assert torch.equal(torch.get_rng_state(), before)


def test_probes_are_dropped_unless_they_are_allowed(references):
    metrics = [*jsd_metrics(references, noise_floor=()), *unlearned_accuracy_metrics(BENCHMARK)]
    strategy = learn(make(evaluator=quiet(*metrics)), PERMUTED.train_stream[:3])
    strategy.unlearn([2])
    names = strategy.eval(TEST)
    assert all(metric.probes == {} for metric in metrics)
    assert any("JSD_remaining/" in name for name in names)
    of_probes = {name: value for name, value in names.items() if "JSD_own" in name or "UnlearnedAccuracy" in name}
    covered = [f"{metric}_tasks/eval_phase/test_stream" for metric in ("JSD_own", "UnlearnedAccuracy")]
    assert of_probes == dict.fromkeys(covered, 0)
    assert names["JSD_remaining_tasks/eval_phase/test_stream"] == 1
    strategy.unlearn([1], keep_probes=True)
    assert all(set(metric.probes) == {1} for metric in metrics)
    names = strategy.eval(TEST)
    assert "JSD_own/eval_phase/test_stream/Task001" in names
    assert "JSD_own/eval_phase/test_stream/Task002" not in names
    assert [names[name] for name in covered] == [1, 1]
    assert names["JSD_remaining_tasks/eval_phase/test_stream"] == 2
    assert names["JSD_own/eval_phase/test_stream"] == names["JSD_own/eval_phase/test_stream/Task001"]
    strategy.train(BENCHMARK.train_stream[2])
    evaluator = quiet(*unlearned_accuracy_metrics(BENCHMARK))
    silent_one = make(evaluator=evaluator, unlearning=UnlearningPlugin(keep_probes=False))
    learn(silent_one, BENCHMARK.train_stream[:2])
    assert silent_one.evaluator.metrics[0].probes == {}


def test_no_value_is_emitted_during_a_task_or_before_an_unlearning(references):
    strategy = make(evaluator=quiet(*jsd_metrics(references), *accuracy_difference_metrics(references)), eval_every=1)
    stream = with_unlearning(PERMUTED, {2: [0]}).train_stream
    strategy.train(stream[0])
    assert not [name for name in strategy.eval(TEST) if "JSD" in name]
    n = len(strategy.evaluator.get_all_metrics().get("AccuracyDifference/eval_phase/test_stream", ([], []))[1])
    strategy.train(stream[1], eval_streams=[TEST])
    history = strategy.evaluator.get_all_metrics()
    assert len(history["AccuracyDifference/eval_phase/test_stream"][1]) <= n + 1  # the one after the task
    assert not [name for name in history if "JSD" in name]


def test_wrong_values_of_a_user_metric_are_refused():
    class Own(ProbingMetric):
        def values(self, strategy, unlearned, remaining):
            return self.returned

    metric = Own()
    metric.returned = None
    strategy = trained(2, BENCHMARK, evaluator=quiet(metric))
    assert strategy.eval(TEST[1:2]) == {}
    for metric.returned in (0.0, [0.5], "none"):
        with pytest.raises(TypeError, match=r"Own.values must return what self.emit\(…\) returns, got"):
            strategy.eval(TEST[1:2])


def test_a_strategy_without_unlearning_plugin_is_refused(references):
    options = {"hidden": (8,), "features": 4, "optimizer": "sgd", "train_epochs": 1}
    strategy = trained(1, BENCHMARK, kind=Naive, evaluator=quiet(*jsd_metrics(references)), **options)
    with pytest.raises(TypeError, match=r"need an UnlearningPlugin, which Naive does not have"):
        strategy.eval([TEST[0]])
