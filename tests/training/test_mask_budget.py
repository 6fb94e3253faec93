"""Masks that keep to a budget of new units."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.strategies import learn, make
from torch.optim import SGD, Adam

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.training import EVEN_BUDGET, HAT, AdaHAT, AmnesiacHAT, HardAttention
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import HATPlugin

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


@pytest.mark.parametrize("kind", [HAT, AdaHAT, AmnesiacHAT])
@pytest.mark.parametrize("make_optimizer", [lambda p: Adam(p, lr=3e-3), lambda p: SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("budget", [0.3, "even"])
def test_a_task_opens_as_many_new_units_as_it_may(kind, make_optimizer, budget):
    strategy = made(kind, optimizer=make_optimizer, masks=replace(EVEN_BUDGET, budget=budget))
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


def test_what_an_unlearning_gives_back_goes_to_the_next_task():
    opened = []
    for requested in ([], [0, 1]):
        strategy = learn(made(), LONG.train_stream[:3])
        if requested:
            strategy.unlearn(requested)
        opened.append(new_units(strategy, LONG.train_stream[3])[1])
    assert all(more >= less for less, more in zip(*opened, strict=True))
    assert sum(opened[1]) > sum(opened[0])


@pytest.mark.parametrize("reuse", [0.0, 0.5, 1.0])
def test_of_units_in_use_a_task_reads_no_more_than_a_share(reuse):
    strategy = learn(made(masks=replace(EVEN_BUDGET, budget=0.2, reuse=reuse)), LONG.train_stream[:2])
    first, second = (strategy.model.by_layer(strategy.model.binary_mask(task)) for task in (0, 1))
    both = [int((first[name] & second[name]).sum()) for name in first]
    assert all(n <= reuse * int(units.sum()) for n, units in zip(both, first.values(), strict=True))
    assert (sum(both) > 0) == (reuse > 0)
    new = [int((second[name] & ~first[name]).sum()) for name in first]
    assert new == [math.floor(0.2 * (n - math.floor(0.2 * n))) for n in SIZES]


class Watch(HATPlugin):
    """Keeps the gate of every step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gates = []

    def after_update(self, strategy, **kwargs):
        self.gates.append(self.in_training.gate.clone())
        super().after_update(strategy, **kwargs)


@pytest.mark.parametrize("warm_up", [0.0, 0.25, 1.0])
def test_the_mask_is_fixed_behind_the_warm_up(warm_up):
    strategy = made(HAT, masks=replace(EVEN_BUDGET, budget=0.3, warm_up=warm_up))
    watch = Watch(masks=find_plugin(strategy, HATPlugin).masks)
    strategy.plugins[strategy.plugins.index(find_plugin(strategy, HATPlugin))] = watch
    strategy.train(LONG.train_stream[0])
    steps = len(watch.gates)
    assert steps == 20
    mask = strategy.model.binary_mask(0)
    fixed = round(warm_up * steps)
    assert all(torch.equal(gate, mask.float()) for gate in watch.gates[fixed:])
    assert not any(torch.equal(gate, mask.float()) for gate in watch.gates[:fixed])
    assert [int(units.sum()) for units in strategy.model.by_layer(mask).values()] == [12, 9, 6]


def test_shares():
    even = HardAttention(budget="even")
    assert [even.shares(n)[0] for n in (1, 2, 5, 19, None)] == [1, 2 / 3, 1 / 3, 0.1, 0.25]
    assert HardAttention(budget=0.1, reuse=0.2).shares(5) == (0.1, 0.2)
    assert even.shares(5)[1] == 0.5


@pytest.mark.parametrize(
    ("setting", "value"),
    [("budget", 0), ("budget", 1.5), ("budget", "odd"), ("warm_up", -0.1), ("warm_up", 1.1), ("reuse", -1)],
)
def test_values_that_are_not_allowed(setting, value):
    with pytest.raises(ValueError, match=f"{setting} must"):
        HardAttention(**{"budget": 0.5, setting: value})


@pytest.mark.parametrize("setting", ["reuse", "warm_up"])
def test_settings_of_a_budget_are_refused_without_one(setting):
    with pytest.raises(ValueError, match=f"{setting}=0.3 has no meaning without a budget"):
        HardAttention(**{setting: 0.3})
