"""Cleaning optimizers of the tasks that go: their moments, gradients and parameter lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.planning import Preparation
from avalanche_amnesia.unlearning.subject import Subject


def purge_optimizers(subject: Subject, preparation: Preparation, change: Transaction) -> list[str]:
    """Drop gradients, the parameters that go, and all optimizer state: moments mix every task that they saw.

    Only those of a task in training that saw none of the tasks stay, as far as they belong to entries that stay.
    """
    own, removal = preparation.own, preparation.removal
    keeps = subject.in_training_without(preparation.plan.tasks)
    changed = {
        id(p): ~same_bits(removal.values[name], p.detach())
        for name, p in subject.model.named_parameters()
        if keeps and name in removal.values
    }
    for parameter in subject.model.parameters():
        change.set(parameter, grad=None)
    gone = {id(p) for name, p in subject.model.named_parameters() if name in own}
    for optimizer in subject.optimizers:
        kept = {p: entry for p, entry in optimizer.state.items() if id(p) not in gone} if keeps else {}
        change.set(optimizer, state=defaultdict(dict))
        optimizer.state.update({p: _zeroed(entry, changed.get(id(p))) for p, entry in kept.items()})
        for group in optimizer.param_groups:
            change.call(group.__setitem__, "params", group["params"])
            group["params"] = [p for p in group["params"] if id(p) not in gone]
    if subject.optimized is not None:
        change.call(subject.optimized.update, {name: subject.optimized[name] for name in own & set(subject.optimized)})
        for name in own:
            subject.optimized.pop(name, None)
    if not subject.optimizers:
        return []
    if keeps:
        return ["optimizer: the state of the entries that change was zeroed; the tasks' own parameters were dropped"]
    return ["optimizer: its state was dropped, with the tasks' own parameters"]


def _zeroed(state: Mapping[str, Any], changed: Tensor | None) -> dict[str, Any]:
    """One parameter's optimizer state with zeros at some entries."""
    if changed is None:
        return dict(state)
    return {
        name: value.masked_fill(changed, 0) if isinstance(value, Tensor) and value.shape == changed.shape else value
        for name, value in state.items()
    }
