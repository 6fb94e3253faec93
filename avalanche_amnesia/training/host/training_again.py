"""Training of a task again inside an unlearning, with nobody looking on."""

from typing import Any

import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates.base_sgd import PeriodicEval

from avalanche_amnesia.optimizers import follow_model
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import dispatch_to
from avalanche_amnesia.training.host.rehearsal import set_attributes
from avalanche_amnesia.training.host.states import before_loading
from avalanche_amnesia.transaction import Transaction


def train_again(strategy: Strategy, experience: Any, options: dict[str, Any], change: Transaction) -> None:
    """Train one task with the host's own loop, as in a training of its own; metrics and loggers hear nothing of it.

    May happen inside the training of another experience, between its end and the next one.

    Args:
        strategy: it does not have the task.
        experience: the task's.
        options: of ``strategy.train``.
        change: takes all back that the training changed.
    """
    host: Any = strategy
    model, optimizer, clock = strategy.model, strategy.optimizer, strategy.clock
    plugins = [plugin for plugin in strategy.plugins if not isinstance(plugin, (EvaluationPlugin, PeriodicEval))]
    attributes, counts, mode = dict(vars(strategy)), dict(vars(clock)), model.training
    go_back = before_loading(strategy, [optimizer, strategy._criterion, *plugins])

    def undo() -> None:
        go_back()
        set_attributes(strategy, attributes, list(vars(strategy)))

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
    set_attributes(strategy, attributes | {"optimized_param_id": parameters}, list(vars(strategy)))
    vars(clock).update(counts)
    model.train(mode)
