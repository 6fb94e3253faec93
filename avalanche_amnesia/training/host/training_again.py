"""Training of a task again inside an unlearning, with nobody looking on."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates.base_sgd import PeriodicEval

from avalanche_amnesia.audit.record import UnlearningPlan
from avalanche_amnesia.benchmarks.requests import UnlearningRequest
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.optimizers import follow_model
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import dispatch_to
from avalanche_amnesia.training.host.rehearsal import set_attributes
from avalanche_amnesia.training.host.states import before_loading
from avalanche_amnesia.training.plugins.task_mask import DivergedError
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.applying import TrainAgain
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.parts import LeftOut


def retraining(
    plugin: Any, strategy: Strategy, request: Iterable[int] | UnlearningRequest, context: UnlearningContext, data: Any
) -> TrainAgain | None:
    """Check a request for a part of a task, and enter it into the plan; None: the request names whole tasks.

    Returns how the task is trained again inside the unlearning, on ``data`` or, without it, on that of the stream.
    """
    if not isinstance(request, UnlearningRequest) or not request.is_partial:
        return None
    (task,), event = context.tasks, context.event
    parts = (strategy.model, *strategy.plugins)
    if plugin.obey is not True or not any(getattr(part, "trains_again", False) for part in parts):
        here = "" if plugin.obey is True else f" with obey={plugin.obey!r}"
        raise RequestError(
            f"{event}: {type(strategy).__name__}{here} can't train task {task} again in its place without some "
            "samples: DisjointSubnets can, AmnesiacHAT and HAT with isolation='pools', and Independent"
        )
    experience = plugin.stream.experience_of(task, data, plugin.data[task], event)
    left = LeftOut(plugin.forgotten, task, request, experience, event)
    first = plugin.claims.training(task)
    not_kept = [name for name, value in first.options.items() if isinstance(value, tuple)]
    if not_kept:
        raise RequestError(
            f"{event}: task {task} was trained with train({', '.join(not_kept)}=…), which no state keeps, so "
            "that it can't be trained again: unlearn it as a whole"
        )
    plan = replace(context.plan, tasks=(), removed=(), trajectory_bytes=0)
    context.plan = replace(plan, task=task, samples=left.hashes, classes=left.closed)

    def again(context: UnlearningContext, change: Transaction) -> UnlearningPlan:
        plugin.forget(strategy, context.tasks, change)
        try:
            train_again(strategy, left.experience, first.options, change)
        except (ValueError, DivergedError) as error:
            raise RequestError(
                f"{event}: task {task} can't be trained without these samples: {error}. Nothing was changed"
            ) from error
        change.set(plugin, forgotten=left.forgotten)
        reasons = plugin.claims.reasons_beside(context, first)
        return replace(context.plan, claim="approximate" if reasons else "exact", reasons=reasons)

    return again


def train_again(strategy: Strategy, experience: Any, options: dict[str, Any], change: Transaction) -> None:
    """Train one task with the host's own loop, as in a training of its own; metrics and loggers hear nothing of it.

    May happen inside the training of another experience, between its end and the next one.
    """
    host: Any = strategy
    model, optimizer, clock = strategy.model, strategy.optimizer, strategy.clock
    plugins = [plugin for plugin in strategy.plugins if not isinstance(plugin, (EvaluationPlugin, PeriodicEval))]
    attributes, counts, mode = dict(vars(strategy)), dict(vars(clock)), model.training
    go_back = before_loading(strategy, [optimizer, strategy._criterion, *plugins])

    def undo() -> None:
        go_back()
        set_attributes(strategy, attributes)

    change.call(undo)
    with preserved_rng(), torch.enable_grad():
        dispatch_to(strategy, plugins)
        vars(strategy).update(experience=experience, is_training=True, _stop_training=False)
        model.train().to(strategy.device)
        host._before_training_exp(**options)
        host._train_exp(experience, [], **options)
        host._after_training_exp(**options)
    model.zero_grad()
    parameters = dict(model.named_parameters())
    follow_model(optimizer, parameters, strategy.optimized_param_id or {}, fresh=True)
    set_attributes(strategy, attributes | {"optimized_param_id": parameters})
    vars(clock).update(counts)
    model.train(mode)
