"""Measuring never changes a training, happens only between tasks and keeps probes only if allowed."""

import pytest
import torch
from avalanche.training import Naive
from support.measured_runs import BENCHMARK, PERMUTED, TEST, make
from support.strategies import learn, quiet, trained
from support.strategy_state import hashes

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.metrics import (
    capacity_pictures_metrics,
    cost_metrics,
    distance_metrics,
    mask_overlap_metrics,
    membership_metrics,
    owners_metrics,
    relapse_metrics,
)
from avalanche_amnesia.evaluation import (
    References,
    accuracy_difference_metrics,
    capacity_metrics,
    jsd_metrics,
    unlearned_accuracy_metrics,
)
from avalanche_amnesia.evaluation.bases import ProbingMetric
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin


def test_measuring_never_changes_a_training():
    refs = References(make, BENCHMARK)
    metrics = [*jsd_metrics(refs), *accuracy_difference_metrics(refs), *distance_metrics(refs), *cost_metrics(refs)]
    metrics += [*unlearned_accuracy_metrics(BENCHMARK), *relapse_metrics(BENCHMARK, refs)]
    metrics += [*membership_metrics(BENCHMARK, refs), *mask_overlap_metrics(), *owners_metrics()]
    metrics += [*capacity_metrics(), *capacity_pictures_metrics()]
    measured = make(evaluator=quiet(*metrics), eval_every=1)
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
        with pytest.raises(TypeError, match=r"values of Own returned .*: return a list of MetricValue, as self.emit"):
            strategy.eval(TEST[1:2])


def test_a_strategy_without_unlearning_plugin_is_refused(references):
    options = {"hidden": (8,), "features": 4, "optimizer": "sgd", "train_epochs": 1}
    strategy = trained(1, BENCHMARK, kind=Naive, evaluator=quiet(*jsd_metrics(references)), **options)
    with pytest.raises(TypeError, match=r"need an UnlearningPlugin, which Naive does not have"):
        strategy.eval([TEST[0]])
