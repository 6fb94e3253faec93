"""Strategies whose costs are measured: functions that build them for any network of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import EWC, LwF, Naive
from torch import nn

from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import DisjointModel, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AmnesiacHAT, DisjointSubnets
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from benchmarks.networks import Network, make_optimizer

Contestant = Callable[..., Any]
"""Function of a network, an optimizer's name and common arguments of strategies; returns a strategy."""


def masked(strategy_class: type, shadows: bool = False, **options: Any) -> Contestant:
    """Return a function that builds a strategy with unit masks; ``shadows``: with compensation by shadow copies."""

    def make(network: Network, optimizer_name: str, **common: Any) -> Any:
        model = MaskedModel(network.make(), input_shape=network.input_shape)
        optimizer = make_optimizer(optimizer_name, model.parameters())
        own = {"compensation": BackupPlugin()} if shadows else {}
        return strategy_class(model=model, optimizer=optimizer, **own, **options, **common)

    return make


def wsn(network: Network, optimizer_name: str, **common: Any) -> Any:
    """Build a WSN strategy whose masks contain half of the weights."""
    model = SubnetModel(network.make(), density=0.5, n_features=network.features)
    return WSN(model=model, optimizer=make_optimizer(optimizer_name, model.parameters()), **common)


def disjoint(slots: int) -> Contestant:
    """Return a function that builds :class:`DisjointSubnets` with weights divided equally among ``slots`` tasks."""

    def make(network: Network, optimizer_name: str, **common: Any) -> Any:
        model = DisjointModel(network.make(), n_features=network.features)
        optimizer = make_optimizer(optimizer_name, model.parameters())
        return DisjointSubnets(model=model, optimizer=optimizer, isolation=Pools(slots=slots), **common)

    return make


def stock(strategy_class: type, **options: Any) -> Contestant:
    """Return a function that builds a strategy of Avalanche, with this package's data loader."""

    def make(network: Network, optimizer_name: str, **common: Any) -> Any:
        model = MultiHeadModel(network.make(), network.features)
        return strategy_class(
            model=model,
            optimizer=make_optimizer(optimizer_name, model.parameters()),
            criterion=nn.CrossEntropyLoss(),
            plugins=[InMemoryLoaderPlugin()],
            evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
            **options,
            **common,
        )

    return make


CONTESTANTS: dict[str, Contestant] = {
    "Naive": stock(Naive),
    "EWC": stock(EWC, ewc_lambda=1.0),
    "LwF": stock(LwF, alpha=1.0, temperature=2.0),
    "HAT": masked(HAT),
    "AdaHAT": masked(AdaHAT),
    "AmnesiacHAT": masked(AmnesiacHAT),
    "AmnesiacHAT, no compensation": masked(AmnesiacHAT, compensation="none"),
    "AmnesiacHAT, one shadow": masked(AmnesiacHAT, shadows=True),
    "AmnesiacHAT, two shadows": masked(AmnesiacHAT, shadows=True),
    "AmnesiacHAT, four shadows": masked(AmnesiacHAT, shadows=True),
    "WSN": wsn,
    "DisjointSubnets": disjoint(3),
}

EARLIER = {"AmnesiacHAT, two shadows": 2, "AmnesiacHAT, four shadows": 4}
"""Number of tasks trained before the measured task, for strategies with more than one; each task has a shadow."""
