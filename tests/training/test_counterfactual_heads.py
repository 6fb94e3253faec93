"""Heads fitted in advance for the model without earlier tasks: one per affected task, never with an unlearned one."""

import copy
import functools

import pytest
import torch
from support.fault_injection import raiser
from support.strategies import DIGITS, accuracy, amnesiac, batch_normed, learn, trained
from support.strategy_state import bits, trajectory, unlearning_plugin

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.training import head_fit, task_faults
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins import counterfactual
from avalanche_amnesia.training.plugins.counterfactual import SEVERAL, CounterfactualPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

PERMUTED = PermutedDigits(4, n_train=600, n_test=300)


@functools.cache
def _learned(**options):
    return trained(**{"stream": PERMUTED, "train_epochs": 4, **options})


def learned(**options):
    """A strategy that has learned a stream, made once for every set of options."""
    return copy.deepcopy(_learned(**options))


def heads_of(strategy):
    return find_plugin(strategy, CounterfactualPlugin)


FIVE = PermutedDigits(5, n_train=600, n_test=300)


def test_of_five_tasks_all_sets_of_several_share_one_head():
    heads = heads_of(learned(stream=FIVE)).heads[4]
    assert list(heads) == [{0}, {1}, {2}, {3}, SEVERAL]
    seen = heads[SEVERAL].weight
    together, one_by_one = learned(stream=FIVE), learned(stream=FIVE)
    assert together.unlearn([0, 2]).plan.compensated == (1, 3, 4)
    one_by_one.unlearn([0])
    assert set(heads_of(one_by_one).heads[4]) == {SEVERAL}
    one_by_one.unlearn([2])
    for strategy in (together, one_by_one):
        weight = strategy.model.state_dict()["heads.4.weight"]
        assert torch.equal(weight[:, weight.any(0)], seen.float()[:, seen.any(0)])
        assert set(heads_of(strategy).heads[4]) == {SEVERAL}
        strategy.unlearn([1, 3])
        assert heads_of(strategy).heads == {4: {}}


@pytest.mark.parametrize("gone", [[1], [0, 1, 2]])
def test_unlearning_replaces_only_heads_of_affected_tasks_and_improves_them(gone):
    plain, ours = learned(compensation="none"), learned()
    plain.unlearn(gone)
    record = ours.unlearn(gone)
    assert record.plan.compensated == record.affected != ()
    a, b = bits(plain.model), bits(ours.model)
    assert {name for name in a if a[name] != b[name]} == {
        f"heads.{task}.{part}" for task in record.affected for part in ("weight", "bias")
    }
    before = sum(accuracy(plain, PERMUTED.test_stream[task]) for task in record.affected)
    after = sum(accuracy(ours, PERMUTED.test_stream[task]) for task in record.affected)
    assert after > before + 0.01 * len(record.affected), (before, after)


def test_two_requests_give_the_same_heads_as_one_for_both_tasks():
    together, steps = learned(), learned()
    together.unlearn([0, 2])
    steps.unlearn([0])
    assert set(heads_of(steps).heads[3]) == {frozenset({1}), frozenset({2}), frozenset({1, 2})}
    assert steps.unlearn([2]).plan.compensated == (3,)
    one, other = together.model.state_dict(), steps.model.state_dict()
    assert all(torch.equal(one[f"heads.3.{part}"], other[f"heads.3.{part}"]) for part in ("weight", "bias"))


def test_no_heads_are_kept_for_tasks_that_cant_be_unlearned():
    strategy = learn(amnesiac(train_epochs=1, unlearning=UnlearningPlugin(deadline=2)), PERMUTED.train_stream[:2])
    strategy.mark_permanent([1])
    learn(strategy, PERMUTED.train_stream[2:])
    plugin = heads_of(strategy)  # task 0 has expired, task 1 was declared
    assert plugin.sources == {0: set(), 1: set(), 2: set(), 3: {2}}
    assert [set(heads) for heads in plugin.heads.values()] == [set(), set(), set(), {frozenset({2})}]


def test_an_error_while_fitting_changes_no_parameter(monkeypatch):
    strategy, other = amnesiac(), amnesiac(compensation="none")
    for s in (strategy, other):
        s.train(PERMUTED.train_stream[0])
    monkeypatch.setattr(counterfactual, "fitted_head", raiser(MemoryError))
    with pytest.raises(MemoryError, match="injected"):
        strategy.train(PERMUTED.train_stream[1])
    other.train(PERMUTED.train_stream[1])
    assert bits(strategy.model) == bits(other.model)
    assert trajectory(strategy).tasks == (0, 1)


def test_requests_of_a_stream_are_compensated():
    strategy = learned(stream=with_unlearning(PERMUTED, requests={2: [0], 3: [1]}))
    assert [record.plan.compensated for record in unlearning_plugin(strategy).records] == [(1, 2), (2, 3)]


def test_an_unlearning_runs_nothing_through_the_network(monkeypatch):
    """So it is cheaper than a retraining."""
    strategy = learned()

    def runs(*args, **kwargs):
        raise AssertionError("the network ran")

    for name in ("forward", "features", "masked_features"):
        monkeypatch.setattr(type(strategy.model), name, runs)
    assert strategy.unlearn([0, 1]).plan.compensated == (2, 3)


@pytest.fixture
def used(monkeypatch):
    """Samples that heads are fitted to, in order."""
    seen, features = [], counterfactual.CounterfactualFeatures

    def noting(model, task, x, batches):
        seen.append(x)
        return features(model, task, x, batches)

    monkeypatch.setattr(counterfactual, "CounterfactualFeatures", noting)
    return seen


def test_samples_take_no_more_memory_than_they_may(used, monkeypatch):
    strategy = amnesiac(train_epochs=1)
    monkeypatch.setattr(task_faults, "_MOST_BYTES", 100 * 64 * 4)  # a hundred digits
    learn(strategy, PERMUTED.train_stream[:3])
    assert [len(x) for x in used] == [100, 100]
    assert strategy.unlearn([0]).plan.compensated == (1, 2)


def test_heads_are_fitted_to_the_samples_that_the_task_s_head_is_unsure_of(used, monkeypatch):
    monkeypatch.setattr(head_fit, "FEW", 100)
    monkeypatch.setattr(head_fit, "SURE", 0.3)  # of so few samples heads are hardly sure
    strategy = amnesiac(train_epochs=4)
    learn(strategy, PERMUTED.train_stream[:2])
    x, y = task_data(PERMUTED.train_stream[1])
    strategy.model.eval()
    with torch.no_grad():
        errors = 1 - strategy.model(x, 1).softmax(1).gather(1, y[:, None])[:, 0]
    unsure = x[errors > head_fit.SURE]
    assert 200 < len(unsure) < 500
    assert torch.equal(*used, unsure)
    assert find_plugin(strategy, TaskMaskPlugin).unsure is None  # by then they are forgotten


@pytest.mark.parametrize(("options", "copies"), [({}, 2), ({"net": batch_normed}, 2 + 4)])
def test_the_modules_of_a_task_are_copied_once_and_with_norms_in_every_pass(options, copies, monkeypatch):
    made, original = [], head_fit.deepcopy
    monkeypatch.setattr(head_fit, "deepcopy", lambda thing: made.append(thing) or original(thing))
    learn(amnesiac(**options), DIGITS.train_stream[:3])
    assert len(made) == copies  # two tasks; passes: 1 head, then 3 heads


def test_running_statistics_are_those_without_the_task():
    plain, ours = (learned(stream=DIGITS, net=batch_normed, **options) for options in ({"compensation": "none"}, {}))
    assert bits(plain.model) == bits(ours.model)
    plain.unlearn([0])
    assert ours.unlearn([0]).plan.compensated
    assert not torch.equal(*(s.model.task_parts(1)["1"].running_mean for s in (plain, ours)))
    assert torch.equal(*(s.model.task_parts(1)["1"].weight for s in (plain, ours)))
    for task in ours.model.masks:
        assert accuracy(ours, DIGITS.test_stream[task]) > accuracy(plain, DIGITS.test_stream[task]) - 0.05


def test_only_a_head_that_cant_be_fitted_is_missing(monkeypatch):
    strategy, plain = amnesiac(), amnesiac()
    stream = DIGITS.train_stream[:3]
    fit = head_fit.fit_head
    calls = []

    def absurd(features, labels, n_classes, **options):
        calls.append(1)  # own heads of tasks 0 and 1, task 1 without 0, own head of task 2, without 0, without 1
        return fit(features * (1e25 if len(calls) == 6 else 1), labels, n_classes, **options)

    monkeypatch.setattr(head_fit, "fit_head", absurd)
    learn(strategy, stream[:2])
    with pytest.warns(
        UserWarning,
        match=r"task 2 has no head for 1 of 3 sets of tasks that may be unlearned \(without \[1\]: .*overflows\)",
    ):
        strategy.train(stream[2])
    monkeypatch.undo()
    learn(plain, stream)
    assert bits(strategy.model) == bits(plain.model)
    assert set(heads_of(strategy).heads[2]) == {frozenset({0}), frozenset({0, 1})}
    assert strategy.plan_unlearning([0]).compensated == (1, 2)
    plan = strategy.plan_unlearning([1])
    assert plan.affected == (2,)
    assert plan.compensated == ()
    strategy.unlearn([1])
