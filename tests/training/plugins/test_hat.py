"""Masks that HAT learns: a minimum of open units, fewer units at a higher price, embeddings within bounds."""

import pytest
from support.small_runs import make, permuted
from support.strategies import Hears, learn

from avalanche_amnesia.training import HardAttention
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin


@pytest.mark.parametrize("min_units", [1, 3, 1000])
def test_no_layer_falls_below_its_minimum_of_open_units(min_units):
    smallest = []

    def watch(made):
        open_units = made.model.by_layer(made.model.binary_mask(made.model.current_task))
        smallest.append(min(int(mask.sum()) for mask in open_units.values()))

    masks = HardAttention(sparsity_weight=50, min_units=min_units, embedding_lr=1.0)
    strategy = learn(make(masks=masks, train_epochs=4, plugins=[Hears(after_training_iteration=watch)]), permuted())
    for masks in strategy.model.masks.values():
        for mask in masks.values():
            assert int(mask.sum()) >= min(min_units, len(mask))
    assert min(smallest) >= min(min_units, 30)
    if min_units == 1:
        assert min(smallest) < 30  # the price is strong enough to be felt


def test_a_stronger_price_opens_fewer_units():
    sizes = []
    for weight in (0.0, 3.0):
        strategy = learn(make(masks=HardAttention(sparsity_weight=weight), train_epochs=4), permuted().train_stream[:1])
        sizes.append(int(strategy.model.cumulative_mask().sum()))
    assert sizes[1] < sizes[0]


def test_embeddings_stay_within_their_bounds():
    strategy = learn(make(masks=HardAttention(embedding_lr=5.0, embedding_clamp=2.0)), permuted().train_stream[:2])
    assert all(float(strategy.model.task_embedding(task).abs().max()) <= 2 for task in (0, 1))
    assert find_plugin(strategy, HATPlugin).snapshot is None
