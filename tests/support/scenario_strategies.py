"""Strategies that random scenarios run on, and the promises of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from avalanche.training import EWC

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models import MLP, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import WSN, AdaHATRule, ConstantRule, ScoredWeights
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.unlearning.context import own_parameters
from support.strategies import OPTIMIZERS, ConvNet, amnesiac, make, stock

NETS = {"mlp": lambda: MLP(64, hidden=(12,), features=10), "conv": ConvNet}


class MarkedUpdates(TrajectoryPlugin):
    """Puts a power of two, which no other training has, in the place of every update that a task's training made."""

    def __init__(self, marked: bool, **options: Any) -> None:
        super().__init__(**options)
        self.marked, self.n = marked, 0

    @torch.no_grad()
    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        assert self.snapshot is not None
        own = own_parameters(strategy.model, self.snapshot.task)
        for name, parameter in strategy.model.named_parameters():
            if self.marked and name in self.snapshot.values and name not in own:
                old = self.snapshot.values[name]
                parameter.copy_(torch.where(same_bits(parameter.detach(), old), old, old + 2.0 ** -(4 + self.n)))
        self.n += 1
        super().after_training_exp(strategy, **kwargs)


def hat(*, deletion: Any = None, **given: Any) -> Callable[..., Any]:
    def made(trajectory: TrajectoryPlugin, *, deadline: int | None, **options: Any) -> Any:
        options |= {"trajectory": trajectory, "unlearning": UnlearningPlugin(deadline=deadline, deletion=deletion)}
        return amnesiac(train_mb_size=10, train_epochs=1, **given, **options)

    return made


def wsn(**masks: Any) -> Callable[..., Any]:
    def made(trajectory: TrajectoryPlugin, *, deadline: int | None, **options: Any) -> Any:
        options |= {"trajectory": trajectory, "unlearning": UnlearningPlugin(deadline=deadline)}
        options |= {"wrap": partial(SubnetModel, density=0.4, bias="masked")}
        return make(WSN, masks=ScoredWeights(score_lr=0.05, **masks), train_mb_size=10, train_epochs=1, **options)

    return made


def stock_strategy(make: Any, **rest: Any) -> Any:
    def made(trajectory: TrajectoryPlugin, *, net: Any, optimizer: str, plugins: Any, deadline: int | None) -> Any:
        torch.manual_seed(0)
        options = {"model": MultiHeadModel(net()), "optimizer": OPTIMIZERS[optimizer], "plugins": plugins, **rest}
        unlearning = UnlearningPlugin(deadline=deadline)
        return stock(make, recorder=trajectory, unlearning=unlearning, epochs=1, train_mb_size=10, **options)

    return made


@dataclass(frozen=True)
class StrategyKind:
    """A strategy, and its promises beyond those of all strategies.

    Attributes:
        make: makes the strategy around a trajectory plugin.
        options: of the trajectory plugin.
        protects: whether later tasks, and their unlearning, change no logits of earlier tasks.
        revises: whether an unlearning replaces the removed values: then they are no sum of updates.
        keeps_shared: whether an unlearning changes no entry that a remaining task reads.
        tolerance: of the sums of updates; 0 where marked ones are exact.
    """

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    protects: bool = False
    keeps_shared: bool = False
    revises: bool = False
    tolerance: float = 0.0


REPAIRED = {"compensation": BackupPlugin, "repair": partial(RepairPlugin, steps=3, samples_per_task=8)}
KINDS = {
    "hat": StrategyKind(hat(), protects=True),
    "exclusive": StrategyKind(hat(deletion="exclusive"), protects=True, keeps_shared=True),
    "backup and repair": StrategyKind(hat(**REPAIRED), protects=True, revises=True),
    "int8": StrategyKind(hat(adjustment=AdaHATRule(alpha=1e-2)), {"dtype": torch.int8}, tolerance=1e-5),
    "constant": StrategyKind(hat(adjustment=ConstantRule(alpha=0.5), reset_optimizer=False)),
    "wsn": StrategyKind(wsn(scores="redraw"), protects=True, keeps_shared=True),
    "wsn, 2 bits": StrategyKind(wsn(score_bits=2), protects=True, keeps_shared=True),
    "ewc": StrategyKind(stock_strategy(EWC, ewc_lambda=1.0)),
}
