"""Masks under a budget of new units or under a sparsity price, and how many units stay open."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support import small_runs
from support.strategies import Hears, learn, make
from torch.optim import Adam

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.training import EVEN_BUDGET, HAT, AdaHAT, AmnesiacHAT, HardAttention
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import EpochLosses, HATPlugin

LONG = PermutedDigits(12, n_train=100, n_test=50)
SIZES = [40, 30, 20]


made = partial(
    make, hidden=SIZES[:-1], features=SIZES[-1], optimizer=partial(Adam, lr=3e-3), train_epochs=4, train_mb_size=20
)


def new_units(strategy, experience):
    """Free units of each layer before a task, and those of them that it opened."""
    model = strategy.model
    used = model.cumulative_mask().clone()
    strategy.train(experience)
    mask = model.binary_mask(experience.task_label)
    free, opened = (model.by_layer(units).values() for units in (~used, mask & ~used))
    return [int(units.sum()) for units in free], [int(units.sum()) for units in opened]


@pytest.mark.parametrize(("kind", "budget"), [(HAT, 0.3), (AdaHAT, "even"), (AmnesiacHAT, "even")])
def test_a_task_opens_as_many_new_units_as_its_budget_allows(kind, budget):
    strategy = made(kind, masks=replace(EVEN_BUDGET, budget=budget))
    for position, experience in enumerate(LONG.train_stream[:4]):
        free, opened = new_units(strategy, experience)
        share = 2 / (13 - position) if budget == "even" else budget
        assert opened == [max(1, math.floor(share * n)) for n in free]


def test_even_shares_last_to_the_end_of_a_stream_and_its_last_task_takes_the_rest():
    strategy = made(train_epochs=1)
    for experience in LONG.train_stream[:-1]:
        free, opened = new_units(strategy, experience)
        assert min(free) > 0
    free, opened = new_units(strategy, LONG.train_stream[-1])
    assert min(free) > 0
    assert opened == free


@pytest.mark.parametrize("reuse", [0.0, 0.5])
def test_a_task_opens_at_most_a_share_of_the_units_of_earlier_tasks(reuse):
    strategy = learn(made(masks=replace(EVEN_BUDGET, budget=0.2, reuse=reuse)), LONG.train_stream[:2])
    first, second = (strategy.model.by_layer(strategy.model.binary_mask(task)) for task in (0, 1))
    both = [int((first[name] & second[name]).sum()) for name in first]
    assert all(n <= reuse * int(units.sum()) for n, units in zip(both, first.values(), strict=True))
    assert (sum(both) > 0) == (reuse > 0)
    new = [int((second[name] & ~first[name]).sum()) for name in first]
    assert new == [math.floor(0.2 * (n - math.floor(0.2 * n))) for n in SIZES]


@pytest.mark.parametrize("warm_up", [0.0, 0.25, 1.0])
def test_the_mask_is_fixed_after_the_warm_up(warm_up):
    gates = []
    watch = Hears(before_update=lambda made: gates.append(find_plugin(made, HATPlugin).in_training.gate.clone()))
    strategy = made(HAT, masks=replace(EVEN_BUDGET, budget=0.3, warm_up=warm_up), plugins=[watch])
    strategy.train(LONG.train_stream[0])
    assert len(gates) == 20
    mask, fixed = strategy.model.binary_mask(0), round(warm_up * 20)
    assert all(torch.equal(gate, mask.float()) for gate in gates[fixed:])
    assert not any(torch.equal(gate, mask.float()) for gate in gates[:fixed])
    assert [int(units.sum()) for units in strategy.model.by_layer(mask).values()] == [12, 9, 6]


# Without a budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_units", [1, 1000])
def test_no_layer_falls_below_its_minimum_of_open_units(min_units):
    smallest = []

    def watch(made):
        open_units = made.model.by_layer(made.model.binary_mask(made.model.current_task))
        smallest.append(min(int(mask.sum()) for mask in open_units.values()))

    masks = HardAttention(sparsity_weight=50, min_units=min_units, embedding_lr=1.0)
    strategy = learn(
        small_runs.make(masks=masks, train_epochs=4, plugins=[Hears(after_training_iteration=watch)]),
        small_runs.permuted(),
    )
    for masks in strategy.model.masks.values():
        for mask in masks.values():
            assert int(mask.sum()) >= min(min_units, len(mask))
    assert min(smallest) >= min(min_units, 30)
    if min_units == 1:
        assert min(smallest) < 30  # the price is strong enough to be felt


def test_embeddings_stay_within_their_bounds():
    strategy = learn(
        small_runs.make(masks=HardAttention(embedding_lr=5.0, embedding_clamp=2.0)),
        small_runs.permuted().train_stream[:2],
    )
    assert all(float(strategy.model.task_embedding(task).abs().max()) <= 2 for task in (0, 1))
    assert find_plugin(strategy, HATPlugin).snapshot is None


@pytest.mark.parametrize(("losses", "stuck"), [([2.0, 1.9, 1.9], True), ([2.0, 1.5, 1.0], False), ([0.0, 0.0], False)])
def test_an_epoch_is_compared_with_the_first_mini_batch(losses, stuck):
    seen = EpochLosses()
    assert not seen.end_epoch()
    for loss in losses:
        seen.add(torch.tensor(loss))
    assert seen.end_epoch() == stuck
    seen.add(torch.tensor(losses[0] * 0.5))  # the next epoch is looked at by itself
    assert not seen.end_epoch()
