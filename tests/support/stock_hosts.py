"""Stock strategies with every plugin whose state this package knows how to purge."""

from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from avalanche.models import BaseModel, MultiHeadClassifier, MultiTaskModule
from avalanche.models.packnet import PackNetModel, PackNetPlugin
from avalanche.training import AGEM, DER, ER_ACE, EWC, GEM, LFL, MAS, LwF, Naive, Replay, SynapticIntelligence
from torch import Tensor, nn

from avalanche_amnesia.models import MLP, MultiHeadModel
from support.strategies import stock


class OneHead(nn.Module, BaseModel):
    """A backbone with one head that all tasks share, as DER and LFL want it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU())
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def get_features(self, x: Tensor) -> Tensor:
        return self.backbone(x)


class AvalancheNet(MultiTaskModule):
    """A model with a head per task as an Avalanche user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.classifier = MultiHeadClassifier(32, initial_out_features=2)

    def forward(self, x: Tensor, task_labels: Any) -> Tensor:
        return self.classifier(self.backbone(x), task_labels)


def heads() -> nn.Module:
    return MultiHeadModel(MLP(64, hidden=(24,), features=16))


HOSTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ewc": (EWC, heads, {"ewc_lambda": 10.0}),
    "ewc online": (EWC, heads, {"ewc_lambda": 10.0, "mode": "online", "decay_factor": 0.5}),
    "mas": (MAS, heads, {"lambda_reg": 1.0, "alpha": 0.5}),
    "si": (SynapticIntelligence, OneHead, {"si_lambda": 1.0}),
    "lwf": (LwF, heads, {"alpha": 1.0, "temperature": 2.0}),
    "lfl": (LFL, OneHead, {"lambda_e": 1.0}),
    "replay": (Replay, heads, {"mem_size": 30}),
    "gem": (GEM, heads, {"patterns_per_exp": 20, "memory_strength": 0.5}),
    "agem": (AGEM, heads, {"patterns_per_exp": 20, "sample_size": 20}),
    "der": (DER, OneHead, {"mem_size": 60, "batch_size_mem": 10}),
    "er-ace": (ER_ACE, OneHead, {"mem_size": 60, "batch_size_mem": 10}),
    "packnet": (Naive, lambda: PackNetModel(OneHead()), {}),
}


def host(name: str, *, plugins: tuple[SupervisedPlugin, ...] = (), epochs: int = 2, **options: Any) -> Any:
    make, model, own = HOSTS[name]
    if name == "packnet":
        plugins = (*plugins, PackNetPlugin(1, 0.5))
    torch.manual_seed(0)
    return stock(make, model=model(), plugins=plugins, epochs=epochs, **own, **options)


def keeper(strategy: Any, name: str) -> Any:
    """Keeper of the state: the strategy itself, or the plugin of that name."""
    if name in ("der", "er-ace"):
        return strategy
    kinds = {"ewc online": "EWC", "si": "SynapticIntelligence", "lwf": "LwF", "packnet": "PackNet"}
    stem = kinds.get(name, name).lower()
    return next(plugin for plugin in strategy.plugins if type(plugin).__name__.lower() == f"{stem}plugin")
