"""Whatever fails while tasks are unlearned, everything stays as it was; and the next request works."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.logging import BaseLogger
from avalanche.training import EWC, LwF, Replay
from avalanche.training.plugins import EvaluationPlugin, EWCPlugin, LwFPlugin, ReplayPlugin
from support.fault_injection import UNLEARNING_STEPS, FailsAtEvent, after_call, raiser
from support.strategies import DIGITS, Hears, NoMetric, amnesiac, learn, stock, trained
from support.strategy_state import bits, fingerprint, trajectory, unchanged, unlearning_plugin

from avalanche_amnesia import MultiHeadModel, UnlearningPlugin, UnlearningRequest, with_unlearning
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.unlearning import BrokenPluginError
from avalanche_amnesia.unlearning.purging import purgers


class Kept(SupervisedPlugin):
    """Keeps a list that its purger empties."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.ones(3)]


class Announced(NoMetric):
    """A metric that listens to the two events of unlearning, and can fail at one of them."""

    fails_at: str | None = None
    error: type[BaseException] = RuntimeError

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def _hear(self, name):
        self.heard.append(name)
        if self.fails_at == name:
            raise self.error(name)

    def before_unlearning(self, strategy):
        self._hear("before")

    def after_unlearning(self, strategy):
        self._hear("after")


class FailingLogger(BaseLogger):
    fails = False

    def after_unlearning(self, strategy, metric_values, **kwargs):
        if self.fails:
            raise OSError("disk full")


def purge_kept(plugin, context, change):
    change.set(plugin, kept=[])
    return "kept: emptied"


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(purgers._PURGERS, Kept, purge_kept)


ERRORS = [RuntimeError, KeyboardInterrupt, MemoryError]


def metric_strategy():
    metric, logger = Announced(), FailingLogger()
    evaluator = EvaluationPlugin(metric, loggers=[logger])
    strategy = learn(amnesiac(evaluator=evaluator, plugins=[Kept()], train_epochs=1, optimizer="momentum"), DIGITS, 3)
    return strategy, metric, logger


@pytest.mark.parametrize("behind", [False, True], ids=["in front", "behind"])
@pytest.mark.parametrize(("owner", "name"), UNLEARNING_STEPS, ids=lambda v: getattr(v, "__name__", v))
def test_an_error_at_any_step_leaves_everything(registered, monkeypatch, owner, name, behind):
    strategy, _, _ = metric_strategy()
    kept = find_plugin(strategy, Kept)
    for error in ERRORS:
        with unchanged(lambda: fingerprint(strategy, kept.kept)), monkeypatch.context() as patch:
            patch.setattr(owner, name, after_call(getattr(owner, name), error) if behind else raiser(error))
            with pytest.raises(error, match="injected"):
                strategy.unlearn([0, 1])
    record = strategy.unlearn([0, 1])
    assert unlearning_plugin(strategy).records == [record]
    assert kept.kept == []
    untouched, _, _ = metric_strategy()
    untouched.unlearn([0, 1])
    assert bits(strategy.model) == bits(untouched.model)
    strategy.train(DIGITS.train_stream[3])


@pytest.mark.parametrize("event", ["before", "after"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_metric_that_fails_leaves_everything(registered, event, error):
    strategy, metric, _ = metric_strategy()
    before = fingerprint(strategy, find_plugin(strategy, Kept).kept)
    metric.fails_at, metric.error = event, error
    with pytest.raises(error, match=event):
        strategy.unlearn([1])
    assert fingerprint(strategy, find_plugin(strategy, Kept).kept) == before
    metric.fails_at = None
    assert strategy.unlearn([1]).tasks == (1,)
    assert metric.heard[-2:] == ["before", "after"]


def test_a_logger_that_fails_leaves_everything(registered):
    strategy, _, logger = metric_strategy()
    strategy.unlearn([0])  # taints the others
    before = fingerprint(strategy)
    logger.fails = True
    with pytest.raises(BrokenPluginError, match="disk full") as failed:
        strategy.unlearn([2])
    assert isinstance(failed.value.__cause__, OSError)
    assert fingerprint(strategy) == before


def test_a_purger_that_fails_after_others_leaves_everything(registered, monkeypatch):
    class Second(Kept):
        pass

    monkeypatch.setitem(purgers._PURGERS, Second, raiser(RuntimeError))
    strategy = trained(1, plugins=[Kept(), Second()], train_epochs=1)
    before = fingerprint(strategy, [plugin.kept for plugin in strategy.plugins if isinstance(plugin, Kept)])
    with pytest.raises(RuntimeError):
        strategy.unlearn([0])
    assert fingerprint(strategy, [plugin.kept for plugin in strategy.plugins if isinstance(plugin, Kept)]) == before


def stores(strategy):
    ewc, lwf, replay = (find_plugin(strategy, kind) for kind in (EWCPlugin, LwFPlugin, ReplayPlugin))
    buffer = replay and replay.storage_policy
    return [
        ewc and [dict(ewc.saved_params), dict(ewc.importances)],
        lwf and [lwf.lwf.prev_model, dict(lwf.lwf.prev_classes_by_task), id(lwf.lwf.prev_model)],
        buffer and [list(buffer.buffer.targets), list(buffer.buffer.targets_task_labels), len(buffer.buffer_groups)],
    ]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (EWC, {"ewc_lambda": 10.0}),
        (EWC, {"ewc_lambda": 10.0, "mode": "online", "decay_factor": 0.5}),
        (LwF, {"alpha": 1.0, "temperature": 2.0}),
        (Replay, {"mem_size": 30}),
    ],
    ids=["ewc", "ewc online", "lwf", "replay"],
)
def test_the_purged_state_of_stock_plugins_comes_back(make, options):
    fails = FailsAtEvent("after_unlearning", KeyboardInterrupt)
    strategy = learn(stock(make, plugins=[fails], epochs=1, **options), DIGITS.train_stream[:3])
    before = fingerprint(strategy, stores(strategy))
    for tasks in ([1], [0, 2], [0, 1, 2]):
        with pytest.raises(KeyboardInterrupt):
            unlearning_plugin(strategy).unlearn(strategy, tasks)
        assert fingerprint(strategy, stores(strategy)) == before
    fails.event = ""
    unlearning_plugin(strategy).unlearn(strategy, [1])
    assert fingerprint(strategy, stores(strategy)) != before
    strategy.train(DIGITS.train_stream[3])
    assert sorted(trajectory(strategy).tasks) == [0, 2, 3]


def test_a_failure_in_the_middle_of_a_task_leaves_everything_and_the_training_can_be_given_up():
    stream = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "iteration", 1)]).train_stream

    seen, fails = {}, FailsAtEvent("after_unlearning", KeyboardInterrupt)
    look = Hears(before_unlearning=lambda strategy: seen.update(fingerprint(strategy)))
    strategy = trained(1, stream, plugins=[look, fails], train_epochs=1)
    untouched = bits(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream[1])
    unlearning_plugin(strategy).current = None
    now = fingerprint(strategy)
    assert dict(now)["model"] == seen["model"]
    for part in ("before", "ledger", "logs", "records", "tainted", "groups", "state", "optimized"):
        assert dict(now)[part] == seen[part], part
    strategy.abort_training()
    assert bits(strategy.model) == untouched
    fails.event = ""
    assert strategy.unlearn([0]).tasks == (0,)


@pytest.mark.parametrize("again", [False, True], ids=["abort", "train again"])
@pytest.mark.parametrize("make", [amnesiac, stock])
def test_a_failure_between_recording_a_task_and_entering_it_into_the_ledger_undoes_the_task(make, again):
    late = FailsAtEvent("after_training_exp", KeyboardInterrupt, when=lambda s: s.experience.task_label == 1)
    strategy = make(plugins=[late], **({"train_epochs": 1} if make is amnesiac else {"epochs": 1}))
    strategy.train(DIGITS.train_stream[0])
    before = bits(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(DIGITS.train_stream[1])
    assert trajectory(strategy).tasks == (0, 1)
    if again:
        strategy.plugins.remove(late)
        strategy.train(DIGITS.train_stream[1])
        assert unlearning_plugin(strategy).ledger.remaining == (0, 1)
        unlearning_plugin(strategy).unlearn(strategy, [1])
    else:
        getattr(strategy, "abort_training", lambda: unlearning_plugin(strategy).abort(strategy))()
    assert bits(strategy.model) == before
    assert trajectory(strategy).tasks == (0,) == unlearning_plugin(strategy).ledger.remaining


def test_the_control_that_only_keeps_the_ledger_is_all_or_nothing_too():
    fails = FailsAtEvent("after_unlearning", KeyboardInterrupt)
    strategy = learn(stock(unlearning=UnlearningPlugin(obey=False), plugins=[fails], epochs=1), DIGITS.train_stream[:1])
    with unchanged(lambda: fingerprint(strategy)), pytest.raises(KeyboardInterrupt):
        unlearning_plugin(strategy).unlearn(strategy, [0])


@pytest.mark.parametrize("event", ["before_unlearning", "after_unlearning"])
def test_a_request_inside_an_unlearning_is_refused_and_takes_the_outer_one_back(event):
    asks = Hears(**{event: lambda strategy: strategy.unlearn([1])})
    strategy = trained(2, plugins=[asks], train_epochs=1)
    before = fingerprint(strategy)
    with pytest.raises(ValueError, match=r"tasks \[0\] are just being unlearned"):
        strategy.unlearn([0])
    assert fingerprint(strategy) == before


def test_a_model_that_was_handed_out_is_the_same_object_afterwards():
    strategy = trained(2, train_epochs=1)
    objects = {name: id(parameter) for name, parameter in strategy.model.backbone.named_parameters()}
    strategy.unlearn([0])
    assert objects == {name: id(parameter) for name, parameter in strategy.model.backbone.named_parameters()}
    assert isinstance(strategy.model, MultiHeadModel)
