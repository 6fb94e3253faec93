"""Methods of the comparison: how each is made, with fitted heads or its own, and the setting that is tried.

Heads are fitted when their task ends, for every method: what differs is then what was learned, and not how well heads
fit. Methods that do so by themselves have no other way; the others can keep the heads that they trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Adam

from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.lab.study.building import make_stock
from avalanche_amnesia.lab.study.settings import MethodSettings
from avalanche_amnesia.models import DisjointModel, MaskedModel, SubnetModel
from avalanche_amnesia.training import (
    EVEN_BUDGET,
    HAT,
    WSN,
    AdaHAT,
    AdaHATRule,
    AmnesiacHAT,
    DisjointSubnets,
    HardAttention,
    ScoredWeights,
    TrajectoryPlugin,
    UnlearningPlugin,
)
from experiments.importance import input_gradient, output_contribution
from experiments.streams import Stream
from experiments.trials import FitHead, Settings


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        kind: class of strategies of this package; None: a stock strategy.
        wrap: class of its model.
        options: from the value of the setting and whether heads are fitted to options of the strategy.
        setting: name of the setting, its middle value and the factor to its neighbours; None: the learning rate's.
        of_model: whether the model takes the setting.
        heads: who fits heads: ``always`` or ``by option`` the method, ``here`` this file.
        obeys: whether requests are obeyed.
        variant: whether it is another one with an option, which stands in a table of its own.
    """

    kind: Any = None
    wrap: Any = None
    options: Callable[[float, bool], dict[str, Any]] = lambda value, fitted: {}
    setting: tuple[str, float, float] | None = None
    of_model: bool = False
    heads: str = "here"
    obeys: bool = True
    variant: bool = False

    @property
    def has_own_heads(self) -> bool:
        """Whether it is also run with heads that are not fitted."""
        return self.heads != "always" and not self.variant


def _planned(value: float, fitted: bool) -> dict[str, Any]:
    return {"isolation": "planned"}


def _reused(reuse: float, fitted: bool) -> dict[str, Any]:
    return {"masks": replace(EVEN_BUDGET, reuse=reuse)}


def _as_published(sparsity: float, fitted: bool) -> dict[str, Any]:
    obeying_nothing = [TrajectoryPlugin(), UnlearningPlugin(obey=False)]
    return {"masks": HardAttention(sparsity_weight=sparsity, fit_head=fitted), "plugins": obeying_nothing}


def _adapted(importance: Any = "sum") -> Callable[[float, bool], dict[str, Any]]:
    return lambda alpha, fitted: _as_published(0.75, fitted) | {"adjustment": AdaHATRule(alpha, importance=importance)}


def _scored(density: float, fitted: bool, **options: Any) -> dict[str, Any]:
    return {"masks": ScoredWeights(score_lr=1e-2, fit_head=fitted, **options)}


def _replayed(weight: float, fitted: bool) -> dict[str, Any]:
    return {"label_weight": weight}


_SPARSITY, _ALPHA, _DENSITY = ("sparsity_weight", 0.75, 4.0), ("alpha", 0.1, 10.0), ("density", 0.5, 1.6)
METHODS = {
    "DisjointSubnets": Method(DisjointSubnets, DisjointModel, _planned, heads="always"),
    "AmnesiacHAT": Method(AmnesiacHAT, MaskedModel, _reused, ("reuse", 0.5, 2.0), heads="always"),
    "HAT": Method(HAT, MaskedModel, _as_published, _SPARSITY, heads="by option", obeys=False),
    "AdaHAT": Method(AdaHAT, MaskedModel, _adapted(), _ALPHA, heads="by option", obeys=False),
    "WSN": Method(WSN, SubnetModel, _scored, _DENSITY, of_model=True, heads="by option"),
    "PALL": Method(PALL, SubnetModel, lambda *_: {"score_lr": 1e-2}, _DENSITY, of_model=True),
    "CLPU-DER++": Method(CLPUDERpp, SideNetworks, _replayed, ("label_weight", 1.0, 2.0)),
    "Independent": Method(Independent, NetworkPerTask),
    "Independent, narrow": Method(Independent, NetworkPerTask),
    "Naive": Method(),
    "EWC": Method(setting=("ewc_lambda", 100.0, 10.0)),
    "LwF": Method(setting=("alpha", 1.0, 3.0)),
    "Replay": Method(),
    "DER++": Method(setting=("label_weight", 0.5, 2.0)),
}
METHODS |= {
    "DisjointSubnets, a share per task": replace(METHODS["DisjointSubnets"], options=lambda *_: {}, variant=True),
    "AdaHAT, input gradient": replace(METHODS["AdaHAT"], options=_adapted(input_gradient), variant=True),
    "AdaHAT, output contribution": replace(METHODS["AdaHAT"], options=_adapted(output_contribution), variant=True),
    "WSN, scores in 1 bit": replace(METHODS["WSN"], options=partial(_scored, score_bits=1), variant=True),
}
FIXED = {"LwF": {"temperature": 2.0}}


def make(
    method: str, stream: Stream, seed: int, benchmark: Any, settings: Settings, fitted: bool = True, **kwargs: Any
) -> Any:
    """A fresh strategy with the same initial bits every time.

    Args:
        method: a name in ``METHODS``.
        stream: whose network, epochs and mini-batches it has.
        seed: every draw derives from it and the task.
        benchmark: the stream's tasks and requests.
        settings: of the method.
        fitted: whether heads are fitted when their task ends; False: as the method does it.
        kwargs: of the strategy (``evaluator``, ``criterion``, ``plugins``).
    """
    how = METHODS[method]
    heads = [FitHead(seed)] if fitted and how.heads == "here" else []
    if how.kind is None:
        built = MethodSettings(method, settings.optimizer, settings.lr, dict(settings.options) | FIXED.get(method, {}))
        strategy = make_stock(built, stream.network, stream.n_tasks, seed, **dict(stream.training) | kwargs)
        strategy.plugins += heads
        return strategy
    value = 0.0 if how.setting is None else settings.options[how.setting[0]]
    options, planned = how.options(value, fitted), Pools.planned(benchmark)
    if options.get("isolation") == "planned":
        options["isolation"] = planned
    plugins = [*options.pop("plugins", []), *kwargs.pop("plugins", []), *heads]
    torch.manual_seed(seed)
    narrow = method.endswith("narrow")
    network = stream.narrow(1 + max(planned.slots.values())) if narrow else stream.network()
    model = how.wrap(network, **settings.options if how.of_model else {})
    optimizer = Adam(model.parameters(), lr=settings.lr)
    return how.kind(
        model=model, optimizer=optimizer, seed=seed, plugins=plugins, **dict(stream.training) | options | kwargs
    )
