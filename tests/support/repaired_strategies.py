"""Strategies that learned four permuted tasks and can repair them."""

import copy
import functools

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.training.host.lookup import find_plugin
from support.strategies import amnesiac, learn
from support.strategy_state import values

PERMUTED = PermutedDigits(4, n_train=600, n_test=300)
TEST = PERMUTED.test_stream


@functools.cache
def _trained(repair, **options):
    plugin = RepairPlugin() if repair == "joint" else repair
    strategy = amnesiac(**{"train_epochs": 4, "compensation": "none", "repair": plugin, **options})
    return learn(strategy, PERMUTED.train_stream)


def trained(repair=None, **options):
    """A strategy that has learned four tasks, to be changed at will."""
    return copy.deepcopy(_trained(repair, **options))


def plugin_of(strategy):
    return find_plugin(strategy, RepairPlugin)


def own_names(strategy, tasks):
    return {n for n in values(strategy.model) if n.startswith(tuple(f"heads.{t}." for t in tasks))}
