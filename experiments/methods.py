"""Methods of the comparison: how each is made, with fitted heads or its own, and the setting that is tried.

Heads are fitted when their task ends, for every method: what differs is then what was learned, and not how well heads
fit. Methods that do so by themselves have no other way; the others can keep the heads that they trained.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from avalanche_amnesia import AnalyticModel, RanPAC
from avalanche_amnesia.benchmarks.data import task_data
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
        most: the highest value that the setting can have.
        shards: into how many parts the data of a task are divided, with a model for each.
        chosen: whether there are settings to choose.
    """

    kind: Any = None
    wrap: Any = None
    options: Callable[[float, bool], dict[str, Any]] = lambda value, fitted: {}
    setting: tuple[str, float, float] | None = None
    of_model: bool = False
    heads: str = "here"
    obeys: bool = True
    variant: bool = False
    most: float = inf
    shards: int = 1
    chosen: bool = True

    @property
    def has_own_heads(self) -> bool:
        """Whether it is also run with heads that are not fitted."""
        return self.heads != "always" and not self.variant

    @property
    def proven(self) -> bool:
        """Whether the tables say more of it than accuracy, bytes and CPU time."""
        return self.kind is not NearestMean and self.shards == 1


def random_features(inputs: int, seed: int) -> AnalyticModel:
    """Return RanPAC's model over random ReLU features of the pixels."""
    return AnalyticModel(None, inputs, projection=2000, batch=64, seed=seed)


class NearestMean(nn.Module):
    """Nearest class mean, by task, over the random ReLU features that RanPAC has: sums alone, so exact.

    Args:
        experiences: of the tasks that remain.
        inputs: numbers of a sample.
        seed: of the features.
    """

    def __init__(self, experiences: Iterable[Any], inputs: int, seed: int) -> None:
        super().__init__()
        self.over, self.means = random_features(inputs, seed), nn.ParameterDict()
        for experience in experiences:
            x, y = task_data(experience)
            sums = torch.zeros((int(y.max()) + 1, self.over.width), dtype=torch.double)
            for images, labels in zip(x.split(1000), y.split(1000), strict=True):
                sums.index_add_(0, labels, self.over.features(images))
            means = sums / y.bincount()[:, None]
            self.means[str(experience.task_label)] = nn.Parameter(means, requires_grad=False)

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Return minus the distance to each class's mean."""
        return -torch.cdist(self.over.features(x), self.means[str(task)])


class Shards(nn.Module):
    """Mean of the probabilities of models that each learned a part of the data (SISA, Bourtoule et al., 2021)."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Return the probabilities."""
        return torch.stack([model(x, task).softmax(1) for model in self.models]).mean(0)


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
    "AmnesiacHAT": Method(AmnesiacHAT, MaskedModel, _reused, ("reuse", 0.5, 2.0), heads="always", most=1.0),
    "HAT": Method(HAT, MaskedModel, _as_published, _SPARSITY, heads="by option", obeys=False),
    "AdaHAT": Method(AdaHAT, MaskedModel, _adapted(), _ALPHA, heads="by option", obeys=False),
    "WSN": Method(WSN, SubnetModel, _scored, _DENSITY, of_model=True, heads="by option", most=1.0),
    "PALL": Method(PALL, SubnetModel, lambda *_: {"score_lr": 1e-2}, _DENSITY, of_model=True, most=1.0),
    "CLPU-DER++": Method(CLPUDERpp, SideNetworks, _replayed, ("label_weight", 1.0, 2.0)),
    "Independent": Method(Independent, NetworkPerTask),
    "Independent, narrow": Method(Independent, NetworkPerTask),
    "SISA": Method(Independent, NetworkPerTask, heads="always", shards=3),
    "RanPAC": Method(RanPAC, AnalyticModel, heads="always", chosen=False),
    "Nearest class mean": Method(NearestMean, heads="always", chosen=False),
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
    if how.kind is RanPAC:
        model = random_features(benchmark.train_stream[0].dataset[0][0].numel(), seed)
        return RanPAC(model=model, train_mb_size=1024, seed=seed, **kwargs)
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
