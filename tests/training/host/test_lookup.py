"""Plugins are called at every event as often as in a stock strategy, and metrics read the same values."""

import pytest
from avalanche.core import BaseSGDPlugin, SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates import SupervisedTemplate
from support.small_runs import masked_mlp, permuted
from support.strategies import Hears, NoMetric, make, quiet

from avalanche_amnesia.training.host.lookup import EVENTS_OF_ITERATIONS, ListenerDispatch
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin


class Stock(SupervisedTemplate):
    def eval(self, exp_list, **kwargs):
        """The host evaluates once before any training, when there is no head yet."""
        known = [experience for experience in exp_list if experience.task_label in self.model.tasks]
        return super().eval(known, **kwargs) if known else {}


class Listening(ListenerDispatch, Stock):
    pass


def run(dispatch, plugins=(), evaluator=None):
    options = {"model": masked_mlp(), "optimizer": "sgd", "evaluator": quiet() if evaluator is None else evaluator}
    plugins = [SeedingPlugin(0), HATPlugin(), *plugins]
    strategy = make(dispatch, plugins=plugins, train_mb_size=32, eval_every=1, **options)
    benchmark = permuted(2)
    results = []
    for task in range(2):
        results.append(strategy.train(benchmark.train_stream[task], eval_streams=[benchmark.test_stream[: task + 1]]))
        results.append(strategy.eval(benchmark.test_stream[: task + 1]))
    return results


def counting(base, events, calls):
    def handler(event):
        def handle(self, *args, **kwargs):
            calls.append(event)
            inherited = getattr(super(kind, self), event, None)
            return None if inherited is None else inherited(*args, **kwargs)

        return handle

    kind = type("Counting" + base.__name__, (base,), {event: handler(event) for event in events})
    return kind


@pytest.mark.parametrize("events", [EVENTS_OF_ITERATIONS, EVENTS_OF_ITERATIONS[3:4]], ids=lambda e: "-".join(e)[:30])
def test_plugins_metrics_and_loggers_are_called_as_by_avalanche(events):
    heard = {}
    for dispatch in (Stock, Listening):
        calls = {"plugin": [], "sgd plugin": [], "metric": [], "logger": []}
        bases = {"plugin": SupervisedPlugin, "sgd plugin": BaseSGDPlugin}
        plugins = [counting(base, events, calls[name])() for name, base in bases.items()]
        metric = counting(NoMetric, events, calls["metric"])()
        logger = counting(BaseLogger, events, calls["logger"])()
        run(dispatch, plugins, EvaluationPlugin(metric, loggers=[logger]))
        heard[dispatch] = calls
    assert heard[Listening] == heard[Stock]
    assert all(set(calls) == set(events) for calls in heard[Listening].values())


def test_a_subclass_of_the_evaluation_plugin_and_a_handler_of_an_instance_are_called():
    calls, of_instance = [], []

    class Own(EvaluationPlugin):
        def after_update(self, strategy, **kwargs):
            calls.append(strategy.clock.train_iterations)

    run(Listening, [Hears(before_update=of_instance.append)], Own(loggers=[BaseLogger()]))
    assert calls == list(range(20))
    assert len(of_instance) == 20


def test_metrics_equal_those_of_avalanche():
    logged = {}

    class Log(BaseLogger):
        def log_single_metric(self, name, value, x_plot):
            logged.setdefault(current, []).append((name, float(value), x_plot))

    results = {}
    for current in (Stock, Listening):
        metrics = (
            accuracy_metrics(minibatch=True, epoch=True, epoch_running=True, experience=True, stream=True),
            loss_metrics(minibatch=True, epoch=True, experience=True, stream=True),
        )
        results[current] = run(current, evaluator=EvaluationPlugin(*metrics, loggers=[Log()]))
    assert results[Listening] == results[Stock]
    assert logged[Listening] == logged[Stock]
    assert len(logged[Listening]) > 40
