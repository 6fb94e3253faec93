"""A strategy as an unlearning sees it: what is ours in it, what is the host's, and what its training can mix."""

from __future__ import annotations

from functools import partial
from typing import Any

from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.training.host.history import TaskHistory
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.host.provenance import provenance_of
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.repair import RepairPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.unlearning.claims import Claims
from avalanche_amnesia.unlearning.compensation import Compensation
from avalanche_amnesia.unlearning.subject import Subject

_OURS = (SeedingPlugin, InMemoryLoaderPlugin, TaskMaskPlugin, TrajectoryPlugin, RepairPlugin, Compensation)


def subject_of(
    strategy: Any,
    asking: SupervisedPlugin,
    recorder: TrajectoryPlugin,
    *,
    ledger: TaskLedger,
    history: TaskHistory,
    claims: Claims,
    known: frozenset[int] | None,
    in_training: int | None,
    compensated: bool,
) -> Subject:
    """Subject of an unlearning of a strategy's tasks: all that it looks at and changes.

    Args:
        strategy: the strategy.
        asking: its plugin that unlearns.
        recorder: its plugin that records.
        ledger: who may be asked for.
        history: of the tasks that were trained.
        claims: what their trainings could see.
        known: every task of the stream, None where that is not known.
        in_training: the task in training; None between tasks.
        compensated: whether anything makes up to the remaining tasks.
    """
    snapshot, masking = recorder.snapshot, find_plugin(strategy, TaskMaskPlugin)
    ours = [p for p in strategy.plugins if p is asking or isinstance(p, (EvaluationPlugin, *_OURS))]
    learned = [strategy._criterion] if claims.criterion_learned(strategy) else []
    return Subject(
        model=strategy.model,
        optimizers=[strategy.optimizer],
        trajectory=recorder.trajectory,
        ledger=ledger,
        plugins=[*(p for p in strategy.plugins if p not in ours), strategy, *learned],
        compensations=[p for p in strategy.plugins if isinstance(p, Compensation)] if compensated else [],
        counters=history.counters,
        before=None if snapshot is None else snapshot.values,
        optimized=getattr(strategy, "optimized_param_id", None),
        claims=claims,
        strategy=strategy,
        known=known,
        unrecorded=frozenset(getattr(strategy.model, "tasks", ())) - {*ledger.remaining, in_training},
        iteration=strategy.clock.train_iterations,
        in_training=in_training,
        others=[*ours, strategy.evaluator],
        provenance=provenance_of(strategy, history.data),
        repair=find_plugin(strategy, RepairPlugin),
        rearrange=None if masking is None else partial(masking.rearrange, strategy),
        moved_without=None if masking is None else partial(masking.moved_without, strategy),
        shared_state=recorder.shared_state,
        opened_whole={} if masking is None else masking.opened_whole,
    )
