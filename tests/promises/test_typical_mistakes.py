"""Mistakes that are easily made are told at once, with what to do, and change nothing."""

import warnings

import pytest
import torch
from avalanche.benchmarks import nc_benchmark, task_incremental_benchmark
from avalanche.training import Cumulative, JointTraining
from support.strategies import DIGITS, amnesiac, learn, make, stock, trained
from support.strategy_state import bits, unchanged, unlearning_plugin
from torch.utils.data import TensorDataset

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.evaluation import References, unlearned_accuracy_metrics
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.training import HAT
from avalanche_amnesia.training.plugins import TrajectoryPlugin, UnlearningPlugin


def test_tasks_that_came_with_a_checkpoint_are_not_recorded_and_make_no_claim_exact():
    """The checkpoint may be that of a model which unlearned something approximately."""
    before = trained(2, train_epochs=1)
    before.unlearn([0])
    strategy = amnesiac(train_epochs=1)
    strategy.model.load_state_dict(before.model.state_dict())
    with pytest.raises(RequestError, match="task 1 can't be unlearned: the model came with it"):
        strategy.plan_unlearning([1])
    with pytest.raises(RequestError, match="task 3 can't be unlearned: it is not yet trained"):
        strategy.plan_unlearning([3])
    loaded = bits(strategy.model)
    strategy.train(DIGITS.train_stream[2])
    assert strategy.unlearn([2]).claim == "approximate"
    assert bits(strategy.model) == loaded


def test_an_unlearning_plugin_that_is_not_the_strategys_own_is_refused():
    strategy = learn(stock(epochs=1), DIGITS.train_stream[:1])
    with unchanged(lambda: bits(strategy.model)), pytest.raises(RequestError, match="none of Naive's plugins"):
        UnlearningPlugin().unlearn(strategy, [0])
    assert unlearning_plugin(strategy).unlearn(strategy, [0]).tasks == (0,)


@pytest.mark.parametrize("wrong", ["logs", torch.int8])
def test_a_trajectory_is_a_plugin(wrong):
    with pytest.raises(TypeError, match="trajectory must be an object of TrajectoryPlugin, got"):
        amnesiac(trajectory=wrong)


def test_one_task_is_no_list_of_tasks():
    strategy = trained(1, train_epochs=1)
    with pytest.raises(RequestError, match="0 is no list of tasks"):
        strategy.mark_permanent(0)
    with pytest.raises(ReferencesError, match="must be a list of tasks"):
        References(amnesiac, DIGITS).reference(1)


def test_references_are_no_benchmark():
    with pytest.raises(TypeError, match="the first argument is the benchmark"):
        unlearned_accuracy_metrics(References(amnesiac, DIGITS))


def test_a_stream_may_have_permanent_tasks_and_no_requests():
    stream = with_unlearning(DIGITS, permanent=[1], deadline=2).train_stream
    assert [(e.requests, e.permanent, e.deadline) for e in stream[:2]] == [((), False, 2), ((), True, 2)]


def test_a_record_tells_of_replaced_heads_only_where_one_was():
    strategy = trained(3, train_epochs=1)
    said = [line for line in strategy.unlearn([2]).purged if "heads" in line]
    assert said == []
    said = [line for line in strategy.unlearn([0]).purged if "heads" in line]
    assert said == ["heads of tasks [1] replaced by those fitted for the model without tasks [0]"]


def test_logs_of_another_run_are_not_gone_on_with(tmp_path):
    trained(1, train_epochs=1, trajectory=TrajectoryPlugin(path=tmp_path))
    strategy = amnesiac(train_epochs=1, trajectory=TrajectoryPlugin(path=tmp_path))
    before = bits(strategy.model)
    for task in (0, 1):
        with pytest.raises(RequestError, match=r"holds updates of tasks \[0\], which another strategy trained"):
            strategy.train(DIGITS.train_stream[task])
    assert bits(strategy.model) == before


def test_a_saved_strategy_goes_on_where_it_was(tmp_path):
    """Right after a training too, and with its logs in files."""
    torch.save(trained(2, train_epochs=1, trajectory=TrajectoryPlugin(path=tmp_path)), tmp_path / "strategy.pt")
    runs = torch.load(tmp_path / "strategy.pt", weights_only=False), trained(2, train_epochs=1)
    for strategy in runs:
        strategy.train(DIGITS.train_stream[2])
    first, second = (strategy.unlearn([1]).changes for strategy in runs)
    assert first == second
    assert bits(runs[0].model) == bits(runs[1].model)


@pytest.mark.parametrize("declined", [False, True])
def test_requests_that_nobody_obeys_are_a_warning_unless_they_are_declined(declined):
    plugins = [TrajectoryPlugin(), UnlearningPlugin(obey=False)] if declined else []
    strategy = make(HAT, hidden=(12,), features=10, plugins=plugins, train_epochs=1)
    first, second, *_ = with_unlearning(DIGITS, {1: [0]}).train_stream
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy.train(first)
        assert not [w for w in said if "obeys no request" in str(w.message)]
        strategy.train(second)
    told = [str(w.message) for w in said if "obeys no request" in str(w.message)]
    assert len(told) == (0 if declined else 1)
    assert all("UnlearningPlugin()" in text and "at task 1" in text for text in told)


def class_incremental():
    """As the host makes it: every experience has the task label 0."""
    sets = []
    for stream in (DIGITS.train_stream, DIGITS.test_stream):
        x = torch.cat([experience.tensors[0] for experience in stream])
        y = torch.cat([experience.tensors[1] + 2 * task for task, experience in enumerate(stream)])
        data = TensorDataset(x, y)
        data.targets = y.tolist()
        sets.append(data)
    return nc_benchmark(*sets, 5, task_labels=False, seed=0)


@pytest.mark.parametrize(("make", "error"), [(amnesiac, TaskError), (stock, RequestError)], ids=["masks", "stock"])
def test_a_class_incremental_stream_is_told_from_a_task_that_comes_twice(make, error):
    benchmark, strategy = class_incremental(), make()
    before = bits(strategy.model)
    message = r"5 experiences of this stream have that task label.*task_incremental_benchmark\(b.*return_task_id=True"
    for ask in (strategy.train, strategy.eval) if make is amnesiac else (strategy.train,):
        with pytest.raises(TaskError, match=message):
            ask(benchmark.train_stream[0])
    assert bits(strategy.model) == before
    mended, strategy = task_incremental_benchmark(benchmark, reset_task_labels=True), make()
    learn(strategy, mended.train_stream[:2])
    assert unlearning_plugin(strategy).ledger.remaining == (0, 1)
    with pytest.raises(error, match="task 1 is already trained and remains: unlearn it first"):
        strategy.train(mended.train_stream[1])


def test_one_training_over_several_tasks_is_refused_as_such():
    strategy = stock(JointTraining, epochs=1)
    before = bits(strategy.model)
    with pytest.raises(TaskError, match=r"JointTraining trains tasks \[0, 1, 2\] in one training.*Train one task"):
        strategy.train(DIGITS.train_stream[:3])
    assert bits(strategy.model) == before
    assert unlearning_plugin(strategy).ledger.remaining == ()
    strategy.train(DIGITS.train_stream[:1])
    assert unlearning_plugin(strategy).ledger.remaining == (0,)
    memory = stock(Cumulative, epochs=1)
    for experience in DIGITS.train_stream[:3]:  # trains again on what it has trained, which is no new task
        memory.train(experience)
    assert unlearning_plugin(memory).ledger.remaining == (0, 1, 2)
