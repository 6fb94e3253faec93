"""Unusable samples and diverged trainings are refused: the error names the task, and its training is undone."""

import copy
from functools import partial

import pytest
import torch
from avalanche.training import Naive
from support import strategies
from support.small_runs import masked_mlp
from support.strategies import learn
from support.strategy_state import same_state, state
from torch import nn
from torch.optim import Adam
from torch.utils.data import TensorDataset

from avalanche_amnesia import DisjointSubnets
from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark
from avalanche_amnesia.contrib.baselines import Independent, NetworkPerTask
from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AmnesiacHAT, head_fit
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.task_mask import DivergedError, TaskError
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

DIGITS = SplitDigits(n_train=300, n_test=100)
KINDS = [AmnesiacHAT, WSN, DisjointSubnets]
net = partial(MLP, 64, hidden=(40,), features=30)


def make(kind, model=None, optimizer=Adam, **options):
    torch.manual_seed(0)
    options = {"train_mb_size": 20, "seed": 3, **options}
    return strategies.make(kind, net=net, model=model, optimizer=partial(optimizer, lr=1e-2), **options)


class Lazy(TensorDataset):
    """Makes its items on demand."""

    def __init__(self, x, y):
        super().__init__(x, y)
        self.targets = y


def digits(change=lambda x: x, lazy=False):
    """Two tasks of digits; ``change`` is applied to the samples of the second."""
    (first, zero), (second, one) = (DIGITS.train_stream[task].tensors for task in (0, 1))
    x, y = torch.cat([first, change(second)]), torch.cat([zero, one + 2])
    data = Lazy(x, y) if lazy else (x, y)
    return task_benchmark(data, data, [[0, 1], [2, 3]]).train_stream


def spoilt(value, where):
    def change(x):
        x[where, 0, 3, 4] = value
        return x

    return change


def beside_the_model(strategy):
    """The ledger's state, and the shapes of the optimizer's parameters."""
    plugin = find_plugin(strategy, UnlearningPlugin)
    groups = [[tuple(p.shape) for p in group["params"]] for group in strategy.optimizer.param_groups]
    return None if plugin is None else plugin.ledger.state_dict(), groups


def assert_refused_and_then_trained(kind, stream, good, message, *, made=True, **options):
    """``made``: whether the host has made a head for the task by then, which its optimizer holds until the next one."""
    strategy = learn(make(kind, **options), stream[:1])
    before, (ledger, groups) = state(strategy.model), beside_the_model(strategy)
    drawn = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(TaskError, match=message):
            strategy.train(stream[1])
        assert same_state(before, state(strategy.model))
        assert strategy.model.tasks == (0,)
        assert beside_the_model(strategy)[0] == ledger
        assert made or beside_the_model(strategy)[1] == groups
        assert torch.equal(torch.get_rng_state(), drawn)
    strategy.train(good[1])
    expected = make(kind, **options)
    expected.train(good[:2])
    assert same_state(state(strategy.model), state(expected.model))
    assert beside_the_model(strategy) == beside_the_model(expected)


@pytest.mark.parametrize(("kind", "value"), [*((kind, float("nan")) for kind in KINDS), (HAT, -float("inf"))])
def test_samples_in_memory_are_checked_before_the_training(kind, value):
    bad = digits(spoilt(value, [4, 7, 30]))
    message = r"task 1: 3 of \d+ samples hold NaN or infinity, the first at index 4; take them out"
    assert_refused_and_then_trained(kind, bad, digits(), message, made=False)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_made_on_demand_are_checked_in_the_first_mini_batch(kind):
    bad = digits(spoilt(float("nan"), slice(None)), lazy=True)
    message = r"task 1: in its first mini-batch 20 of 20 samples hold NaN or infinity.* Its training was undone"
    assert_refused_and_then_trained(kind, bad, digits(lazy=True), message)


@pytest.mark.parametrize("kind", [HAT, WSN])
def test_a_bad_sample_of_a_later_mini_batch_is_found_when_the_weights_are_lost(kind):
    bad = digits(spoilt(float("nan"), [17]), lazy=True)
    message = r"task 1: (in its first mini-batch )?1 of \d+ samples holds NaN or infinity"
    assert_refused_and_then_trained(kind, bad, digits(lazy=True), message, train_mb_size=5)


def relabelled(stream, shift, where=slice(None)):
    """The second task with other labels than its experience says."""
    twin = copy.copy(stream[1])
    twin._samples = copy.copy(twin._samples)
    targets = torch.tensor(twin._samples.targets)
    targets[where] += shift
    twin._samples.targets = targets.tolist()
    return [stream[0], twin]


@pytest.mark.parametrize(
    ("kind", "shift", "where", "message"),
    [
        (HAT, 5, slice(None), r"task 1: its labels lie in 5..6, and its head has 2 classes, 0..1: count the labels"),
        (WSN, -1, slice(None), r"task 1: its labels lie in -1..0, and its head has 2 classes"),
        (Independent, 1, [11], r"task 1: its labels lie in 0..2, and its head has 2 classes"),
        (HAT, -100, slice(None), r"task 1: its labels lie in -99..-99, and its head has 2 classes"),
    ],
    ids=["all above", "all below", "one above", "hidden"],
)
def test_labels_without_a_class_of_the_head_are_refused(kind, shift, where, message):
    good = digits()
    labels = torch.tensor(good[1]._samples.targets)
    where = [int((labels == 1).nonzero()[3])] if where == [11] else where
    assert_refused_and_then_trained(kind, relabelled(good, shift, where), good, message)


def test_a_task_whose_labels_are_all_ignored_is_refused():
    good = digits()
    silent = relabelled(good, 0)
    silent[1]._samples.targets = [-100] * len(silent[1]._samples.targets)
    with pytest.raises(TaskError, match="task 1: all 20 labels are -100, which the loss ignores"):
        make(HAT).train(silent[1])
    some = relabelled(good, 0)
    some[1]._samples.targets[:3] = [-100] * 3
    make(HAT).train(some[1])


def convolutions():
    net = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 12), nn.ReLU()]
    return nn.Sequential(*net)


SHAPED = {
    HAT: (lambda: MaskedModel(convolutions(), input_shape=(1, 8, 8)), r"they need \(1, 8, 8\), torch.float32, for wh"),
    WSN: (lambda: SubnetModel(convolutions(), n_features=12), "they need a backbone that takes them"),
    Independent: (lambda: NetworkPerTask(convolutions(), n_features=12), "they need a backbone that takes them"),
}


@pytest.mark.parametrize("kind", SHAPED)
def test_samples_of_another_shape_are_refused(kind):
    model, needed = SHAPED[kind]
    x, y = DIGITS.train_stream[1].tensors
    larger = nn.functional.pad(x, (1, 1, 1, 1))
    bad = [digits()[0], task_benchmark((larger, y), (larger, y), [[0, 1]] * 2).train_stream[1]]
    message = rf"task 1: the model can't run on its samples of shape \(1, 10, 10\), torch.float32 .*{needed}"
    options = {"train_epochs": 1}
    strategy = learn(make(kind, model(), **options), bad[:1])
    before = state(strategy.model)
    with pytest.raises(TaskError, match=message):
        strategy.train(bad[1])
    assert same_state(before, state(strategy.model))
    strategy.train(digits()[1])
    expected = make(kind, model(), **options)
    expected.train(digits())
    assert same_state(state(strategy.model), state(expected.model))


# Finite and absurd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rate"), [(AmnesiacHAT, 1e12), (WSN, 1e18)])
def test_a_diverged_task_is_undone_and_can_be_trained_again(kind, rate):
    strategy = make(kind)
    stream = digits()
    strategy.train(stream[0])
    before = state(strategy.model)
    strategy.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(DivergedError, match=r"task 1 diverged: .*; train it again with a smaller learning rate"):
        strategy.train(stream[1])
    assert same_state(before, state(strategy.model))
    strategy.optimizer.param_groups[0]["lr"] = 1e-2
    strategy.train(stream[1])
    expected = make(kind)
    expected.train(stream)
    assert same_state(state(strategy.model), state(expected.model))


def test_weights_whose_features_overflow_are_refused():
    strategy = make(HAT, eval_every=1, eval_mb_size=50)
    strategy.optimizer.param_groups[0]["lr"] = 1e10
    with pytest.raises(DivergedError, match="its weights are finite, and its features are not, or overflow float32"):
        strategy.train(digits()[0])


def test_a_diverged_task_of_a_stock_strategy_with_masks_is_undone():
    model = masked_mlp()
    strategy = Naive(model=model, optimizer=Adam(model.parameters(), lr=1e12), plugins=[HATPlugin()], train_mb_size=20)
    before = state(model)
    with pytest.raises(DivergedError, match="task 0 diverged"):
        strategy.train(digits()[0])
    assert same_state(before, state(model))


def test_only_a_head_that_cant_be_fitted_is_missing(monkeypatch):
    strategy, plain = make(AmnesiacHAT), make(AmnesiacHAT)
    stream = DIGITS.train_stream[:3]
    fit = head_fit.fit_head
    calls = []

    def absurd(features, labels, n_classes, **options):
        calls.append(1)  # own heads of tasks 0 and 1, task 1 without 0, own head of task 2, without 0, without 1
        return fit(features * (1e25 if len(calls) == 6 else 1), labels, n_classes, **options)

    monkeypatch.setattr(head_fit, "fit_head", absurd)
    strategy.train(stream[:2])
    with pytest.warns(
        UserWarning,
        match=r"task 2 has no head for 1 of 3 sets of tasks that may be unlearned \(without \[1\]: .*overflows\)",
    ):
        strategy.train(stream[2])
    monkeypatch.undo()
    plain.train(stream)
    assert same_state(state(strategy.model), state(plain.model))
    heads = find_plugin(strategy, CounterfactualPlugin).heads[2]
    assert set(heads) == {frozenset({0}), frozenset({0, 1})}
    assert strategy.plan_unlearning([0]).compensated == (1, 2)
    plan = strategy.plan_unlearning([1])
    assert plan.affected == (2,)
    assert plan.compensated == ()
    strategy.unlearn([1])
