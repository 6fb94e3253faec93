"""Shares of a forgotten update put back, and which of them a measure tells from none."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.measured_runs import MAKERS, PERMUTED, TEST, make
from support.strategies import DIGITS, learn
from support.strategy_state import hashes
from torch import nn

from avalanche_amnesia.contrib.metrics import detection_limit, dose_response, put_back, update_of
from avalanche_amnesia.contrib.metrics.dose_response import rank_sum_p
from avalanche_amnesia.evaluation import accuracy, features_of, take_probe
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import UnlearningPlugin
from avalanche_amnesia.trajectory import TrajectoryError


@pytest.mark.parametrize("kind", MAKERS)
def test_all_of_an_update_put_back_is_the_state_before_and_none_of_it_the_state_after(kind):
    torch.set_num_threads(1)
    strategy = learn(MAKERS[kind](), DIGITS.train_stream[:3])
    backbone = {n: p.detach().clone() for n, p in strategy.model.named_parameters() if n.startswith("backbone")}
    untouched = hashes(strategy.model)
    update = update_of(strategy, 1)
    assert hashes(strategy.model) == untouched
    find_plugin(strategy, UnlearningPlugin).unlearn(strategy, [1])
    after = hashes(strategy.model)
    with put_back(strategy.model, update, 0):
        assert hashes(strategy.model) == after
    moved = 0
    with put_back(strategy.model, update, 1):
        for name, parameter in strategy.model.named_parameters():
            if name in backbone and kind != "wsn":  # WSN leaves in place what later tasks read
                torch.testing.assert_close(parameter, backbone[name])
                moved += int((update.get(name, torch.zeros(1)) != 0).sum())
    assert hashes(strategy.model) == after
    assert moved > 100 or kind == "wsn"


def test_the_model_is_as_it_was_after_an_error_too():
    net = nn.Linear(2, 2)
    before = hashes(net)

    def interrupted():
        with put_back(net, {"weight": torch.ones(2, 2).double()}, 0.5):
            assert hashes(net) != before
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert hashes(net) == before
    for update, share in (({"weight": torch.ones(3)}, 0.5), ({"other": torch.ones(2, 2)}, 0.5), ({}, float("nan"))):
        with pytest.raises(ValueError, match=r"take the update of this model|share must be a finite number"):
            put_back(net, update, share).__enter__()
    with pytest.raises(ValueError, match="must be distinct"):
        dose_response(net, {}, [0.0, 0.5, 0.5], {})


def test_updates_are_of_recorded_tasks_of_strategies_that_record():
    strategy = learn(make(), PERMUTED.train_stream[:1])
    with pytest.raises(TrajectoryError, match="task 3 is not recorded"):
        update_of(strategy, 3)
    strategy.plugins = []
    with pytest.raises(TypeError, match="AmnesiacHAT records no updates"):
        update_of(strategy, 0)


def test_readings_are_those_of_the_shares():
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(2.0)
    read = {"weight": lambda model: float(model.weight), "square": lambda model: float(model.weight**2)}
    found = dose_response(net, {"weight": torch.tensor([[4.0]]).double()}, [0.0, 0.25, 1.0], read)
    assert found == {"weight": {0.0: 2, 0.25: 3, 1.0: 6}, "square": {0.0: 4, 0.25: 9, 1.0: 36}}


def test_an_old_head_reads_more_the_more_of_a_task_is_put_back():
    strategy = learn(make(train_epochs=15), PERMUTED.train_stream[:3])
    probe, update, (x, y) = take_probe(strategy.model, 1), update_of(strategy, 1), TEST[1].tensors

    def old_head(model):
        return accuracy(probe.head(features_of(model, x, probe.mask)), y)

    trained = old_head(strategy.model)
    strategy.unlearn([1])
    found = dose_response(strategy.model, update, [0.0, 0.75, 1.0], {"old head": old_head})["old head"]
    assert found[0.0] < 0.3 < found[0.75] < found[1.0] == pytest.approx(trained, abs=0.02)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_the_p_value_counts_all_ways_to_deal_the_labels(larger, smaller):
    ranks = stats.rankdata([*larger, *smaller])
    observed = ranks[: len(larger)].sum()
    sums = [ranks[list(chosen)].sum() for chosen in combinations(range(len(ranks)), len(larger))]
    assert rank_sum_p(larger, smaller) == pytest.approx(np.mean([total >= observed - 1e-9 for total in sums]))


def test_the_p_value_is_scipy_s_without_ties():
    first, second = np.random.default_rng(0).normal(size=(2, 7))
    theirs = stats.mannwhitneyu(first, second, alternative="greater", method="exact").pvalue
    assert rank_sum_p(first, second) == pytest.approx(theirs)
    assert rank_sum_p([3, 4, 5], [0, 1, 2]) == pytest.approx(1 / 20)


def test_the_limit_is_the_smallest_share_from_which_on_all_are_told_from_0():
    clean = [0.0, 0.1, 0.2]
    far, near = [1.0, 1.1, 1.2], [0.1, 0.0, 0.3]
    assert detection_limit({0.0: clean, 0.1: near, 0.2: far, 0.5: far}) == 0.2
    assert detection_limit({0.5: far, 0.2: near, 0.1: far, 0.0: clean}) == 0.5  # .2 is not: .1 was luck
    assert detection_limit({0.0: clean, 0.1: far, 0.5: near}) is None
    assert detection_limit({0.0: clean, 0.1: far, 0.5: near}, level=0.5) == 0.1
    for readings, words in (
        ({0.1: far}, "expected share 0"),
        ({0.0: clean}, "at least one above it"),
        ({0.0: clean, 0.1: far[:2]}, "as many finite readings at every share"),
        ({0.0: clean, 0.1: [1.0, 2.0, float("nan")]}, "as many finite readings at every share"),
        ({0.0: clean[:2], 0.1: far[:2]}, "2 runs can't reach p"),
    ):
        with pytest.raises(ValueError, match=words):
            detection_limit(readings)
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got 1"):
        detection_limit({0.0: clean, 0.1: far}, level=1)
