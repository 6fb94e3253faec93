"""Methods of the comparison: how to build each strategy, which heads it has, and which setting is tuned.

By default, every method's heads are fitted again at the end of their task, so that the comparison shows differences of
the features, not of the heads. Some methods always fit their heads; all others can also keep the trained heads.
"""

from collections.abc import Callable, Iterable, Mapping
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
    """A method of the comparison: its classes, and how its setting and its heads are handled.

    Attributes:
        kind: strategy class of this package; None: Avalanche's strategy of the method's name.
        wrap: model class.
        options: function of the setting's value and of whether heads are fitted; returns options of the strategy.
        setting: name of the tuned setting, its middle value and the factor between tried values; None: only the
            learning rate is tuned.
        of_model: True if the setting is an argument of the model, not of the strategy.
        heads: who fits heads: the method, ``always`` or ``by option``, or a plugin of these scripts (``here``).
        obeys: False if the method ignores unlearning requests.
        variant: True if it is another method with one changed option; shown in a separate table.
        most: highest allowed value of the setting.
        shards: number of parts of each task's data; each part has its own model.
        chosen: False if there is nothing to tune.
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
        """Return True if the method is also run without fitted heads."""
        return self.heads != "always" and not self.variant

    @property
    def proven(self) -> bool:
        """Return True if the tables show all measures of the method, not only accuracy, bytes and CPU time."""
        return self.kind is not NearestMean and self.shards == 1


def random_features(inputs: int, seed: int) -> AnalyticModel:
    """Return RanPAC's model with 2,000 random ReLU features of the pixels in place of a frozen network."""
    return AnalyticModel(None, inputs, projection=2000, batch=64, seed=seed)


class NearestMean(nn.Module):
    """Classifier by the nearest class mean of RanPAC's random features; unlearns exactly, because it stores only sums.

    Args:
        experiences: training experiences of the remaining tasks.
        inputs: number of inputs (pixels) of a sample.
        seed: seed of the random features.
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
        """Return as logits the negative distances to the class means of ``task``, ``(batch, classes)``."""
        return -torch.cdist(self.over.features(x), self.means[str(task)])


class Shards(nn.Module):
    """Ensemble of models that were trained on different parts of the data (SISA, Bourtoule et al., 2021)."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Return the models' mean class probabilities, ``(batch, classes)``."""
        return torch.stack([model(x, task).softmax(1) for model in self.models]).mean(0)


def _planned(value: float, fitted: bool) -> dict[str, Any]:
    return {"isolation": "planned", "fit_head": fitted}


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
    "DisjointSubnets": Method(DisjointSubnets, DisjointModel, _planned, heads="by option"),
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
    """Build a new strategy of a method; equal arguments give the same initial weights, bit for bit.

    Args:
        method: a name in ``METHODS``.
        stream: stream that sets the network, the epochs and the mini-batch size.
        seed: seed of all random numbers, together with the task.
        benchmark: the stream's tasks and requests.
        settings: settings of the method.
        fitted: True to fit each head at the end of its task; False for the heads that the method has by itself.
        kwargs: further arguments of the strategy (``evaluator``, ``criterion``, ``plugins``).
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
    assert isinstance(planned.slots, Mapping)
    network = stream.narrow(1 + max(planned.slots.values())) if narrow else stream.network()
    model = how.wrap(network, **settings.options if how.of_model else {})
    optimizer = Adam(model.parameters(), lr=settings.lr)
    return how.kind(
        model=model, optimizer=optimizer, seed=seed, plugins=plugins, **dict(stream.training) | options | kwargs
    )
