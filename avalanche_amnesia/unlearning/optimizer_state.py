"""Cleaning the optimizer of the tasks that go: its moments, gradients and parameter lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.planning import Unlearning


def purge_optimizer(unlearning: Unlearning, change: Transaction) -> str:
    """Drop gradients, the parameters that go, and all optimizer state: moments mix every task that they saw.

    Only those of a task in training that saw none of the tasks stay, as far as they belong to entries that stay.
    """
    host, own, removal = unlearning.host, unlearning.own, unlearning.removal
    parameters, optimizer = unlearning.parameters, host.optimizer
    keeps = host.before is not None and not unlearning.claims.influences & set(unlearning.plan.tasks)
    changed = {id(parameters[name]): moved.where for name, moved in removal.moved.items()} if keeps else {}
    for parameter in parameters.values():
        if parameter.grad is not None:
            change.set(parameter, grad=None)
    gone = {id(parameters[name]) for name in own}
    kept = {p: entry for p, entry in optimizer.state.items() if id(p) not in gone} if keeps else {}
    change.set(optimizer, state=defaultdict(dict))
    optimizer.state.update({p: _zeroed(entry, changed.get(id(p))) for p, entry in kept.items()})
    for group in optimizer.param_groups:
        change.call(group.__setitem__, "params", group["params"])
        group["params"] = [p for p in group["params"] if id(p) not in gone]
    optimized = getattr(host.strategy, "optimized_param_id", None)  # the host's own table of them, by name
    if optimized is not None:
        change.call(optimized.update, {name: optimized[name] for name in own & set(optimized)})
        for name in own:
            optimized.pop(name, None)
    if keeps:
        return "optimizer: the state of the entries that change was zeroed; the tasks' own parameters were dropped"
    return "optimizer: its state was dropped, with the tasks' own parameters"


def _zeroed(state: Mapping[str, Any], changed: Tensor | None) -> dict[str, Any]:
    """One parameter's optimizer state with zeros at some entries."""
    if changed is None:
        return dict(state)
    return {
        name: value.masked_fill(changed, 0) if isinstance(value, Tensor) and value.shape == changed.shape else value
        for name, value in state.items()
    }
