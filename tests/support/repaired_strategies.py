"""Strategies that learned four permuted tasks and can repair them, and what is looked at in them."""

import copy
import functools

import torch

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.models.task_store import whole
from avalanche_amnesia.training.host import find_plugin
from support.strategies import amnesiac

PERMUTED = PermutedDigits(4, n_train=600, n_test=300)
MODES = ["joint", "sequential", "sequential_adahat"]


@functools.cache
def _trained(repair, **options):
    plugin = RepairPlugin(repair) if isinstance(repair, str) else repair
    strategy = amnesiac(**{"train_epochs": 4, "compensation": "none", "repair": plugin, **options})
    for experience in PERMUTED.train_stream:
        strategy.train(experience)
    return strategy


def trained(repair=None, **options):
    """A strategy that has learned four tasks, to be changed at will."""
    return copy.deepcopy(_trained(repair, **options))


def plugin_of(strategy):
    return find_plugin(strategy, RepairPlugin)


@torch.no_grad()
def logits(strategy, task):
    strategy.model.eval()
    return strategy.model(task_data(PERMUTED.test_stream[task])[0], task)


def accuracy(strategy, task):
    y = task_data(PERMUTED.test_stream[task])[1]
    return float((logits(strategy, task).argmax(1) == y).double().mean())


def values(strategy):
    with whole(strategy.model) as model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def own_names(strategy, tasks):
    return {
        n for n in values(strategy) if n.startswith(tuple(f"{kind}.{t}." for kind in ("heads", "own") for t in tasks))
    }
