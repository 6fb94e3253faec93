"""Plugins that hold the weights at anchors, by importance: EWC, SI and MAS."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from avalanche.training.plugins import EWCPlugin, MASPlugin, SynapticIntelligencePlugin
from avalanche.training.utils import ParamData
from torch import Tensor, nn

from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.purging.registry import PurgeContext, SavedState, StateAdapter, register_adapter

Store = dict[str, Any]  # name → the host's ParamData


def _tensors(prefix: str, store: Store) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": kept.data.clone() for name, kept in store.items()}


def _store(state: SavedState, prefix: str) -> Store:
    found = {n.removeprefix(f"{prefix}/"): v for n, v in state.tensors.items() if n.startswith(f"{prefix}/")}
    return {
        name: ParamData(name, value.shape, init_tensor=value.clone(), device=value.device)
        for name, value in found.items()
    }


def _only(store: Store, names: Collection[str]) -> Store:
    return {name: kept for name, kept in store.items() if name in names}


def _lasting(model: nn.Module) -> set[str]:
    """Names of the parameters that outlive a training: a mask in the making (``embedding``) is the task's own."""
    names = {name for name, _ in model.named_parameters()}
    if not isinstance(model, MultiHeadModel):
        return names
    prefixes = ("backbone.", *(f"{container}." for container in model.task_containers))
    return {name for name in names if name.startswith(prefixes)}


def _filled(store: Store, value: float) -> Store:
    return {
        name: ParamData(name, kept.shape, init_tensor=torch.full_like(kept.data, value), device=kept.device)
        for name, kept in store.items()
    }


def _at_last_commit(store: Store, context: PurgeContext) -> Store:
    """An anchor that was the state after the last training, as that state is now."""
    new = dict(context.removal.values) | dict(context.removal.before)
    result = {}
    for name, kept in store.items():
        value = new[name].reshape(kept.shape).to(kept.device).clone() if name in new else kept.data
        result[name] = ParamData(name, kept.shape, init_tensor=value, device=kept.device)
    return result


@register_adapter(EWCPlugin)
class EWCAdapter(StateAdapter):
    """Anchors and importances per experience (``separate``), or one sum of importances (``online``)."""

    def save(self, plugin: Any) -> SavedState:
        """Both stores, by experience."""
        tensors: dict[str, Tensor] = {}
        for part in ("saved_params", "importances"):
            for counter, store in getattr(plugin, part).items():
                tensors |= _tensors(f"{part}/{counter}", store)
        counters = {part: list(getattr(plugin, part)) for part in ("saved_params", "importances")}
        return SavedState(tensors, counters)

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Fill both stores."""
        for part, counters in state.data.items():
            getattr(plugin, part).clear()
            getattr(plugin, part).update({counter: _store(state, f"{part}/{counter}") for counter in counters})

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Drop the tasks' entries, and take their updates out of later anchors."""
        change.set(plugin, saved_params=deepcopy(plugin.saved_params), importances=deepcopy(plugin.importances))
        if plugin.mode == "online":  # its one running sum of importances can't be taken apart
            plugin.saved_params.clear()
            plugin.importances.clear()
            return "EWC (online): the anchor and the summed importances, which mix all tasks, were dropped"
        of_counter = {counter: task for task, counter in context.counters.items()}
        for store in (plugin.saved_params, plugin.importances):
            for counter in list(store):
                if of_counter.get(counter) in context.tasks:
                    del store[counter]
                    continue
                for name in context.own_parameters & set(store[counter]):
                    del store[counter][name]
        for counter, anchor in plugin.saved_params.items():
            for name, update in _updates_before(context, of_counter.get(counter)).items():
                if name in anchor:
                    kept = anchor[name].data
                    anchor[name].data = (kept.double() - update.to(kept.device)).to(kept.dtype)
        return "EWC: the tasks' anchors and importances dropped, their updates taken out of later anchors"


def _updates_before(context: PurgeContext, task: int | None) -> dict[str, Tensor]:
    """Sum of the updates, among those of tasks and repairs that go, that a state saved after ``task`` holds."""
    held = context.writers[: context.writers.index(task)] if task in context.writers else context.writers
    total: dict[str, Tensor] = {}
    for gone in set(held) & set(context.removal.updates):
        for name, update in context.removal.updates[gone].items():
            total[name] = total[name] + update if name in total else update
    return total


@register_adapter(MASPlugin)
class MASAdapter(StateAdapter):
    """One anchor, the state after the last training, and one decayed sum of importances."""

    def save(self, plugin: Any) -> SavedState:
        """Both, where there are any."""
        if plugin.params is None:
            return SavedState(data={"empty": True})
        return SavedState(
            _tensors("params", plugin.params) | _tensors("importance", plugin.importance), {"empty": False}
        )

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Fill both."""
        filled = not state.data["empty"]
        plugin.params = _store(state, "params") if filled else None
        plugin.importance = _store(state, "importance") if filled else None

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Put the anchor to the new state and the importances, which mix all tasks, to zero."""
        if plugin.params is None:
            return "MAS: no anchor yet"
        change.keep(plugin, "params", "importance")
        names = _lasting(context.model)
        plugin.params = _at_last_commit(_only(plugin.params, names), context)
        # The host insists on importances once a task was trained: zeros, which hold nothing.
        plugin.importance = _filled(_only(plugin.importance, names), 0.0)
        return "MAS: the anchor is the state without the tasks; the importances, which mix all tasks, were dropped"


@register_adapter(SynapticIntelligencePlugin)
class SIAdapter(StateAdapter):
    """The state when the last training began, and importances that sum over all tasks."""

    def save(self, plugin: Any) -> SavedState:
        """All seven stores."""
        tensors = _tensors("ewc/0", plugin.ewc_data[0]) | _tensors("ewc/1", plugin.ewc_data[1])
        for part, store in plugin.syn_data.items():
            tensors |= _tensors(f"syn/{part}", store)
        return SavedState(tensors)

    def load(self, plugin: Any, state: SavedState, model: nn.Module) -> None:
        """Fill all seven stores."""
        plugin.ewc_data = (_store(state, "ewc/0"), _store(state, "ewc/1"))
        plugin.syn_data = {part: _store(state, f"syn/{part}") for part in plugin.syn_data}

    def purge(self, plugin: Any, context: PurgeContext, change: Transaction) -> str:
        """Put the anchor to the new state, and the sums to zero, but for a training that is under way."""
        change.keep(plugin, "ewc_data", "syn_data")
        names = _lasting(context.model)
        if context.in_training is not None:
            names |= {name for name, _ in context.model.named_parameters()}
        anchor, importance = (_only(store, names) for store in plugin.ewc_data)
        plugin.ewc_data = (_at_last_commit(anchor, context), _filled(importance, 0.0))
        kept = {part: _only(store, names) for part, store in plugin.syn_data.items()}
        # The path integral of the task in training is its own; everything else mixes tasks or repeats old weights.
        plugin.syn_data = {
            part: store if part == "trajectory" and context.in_training is not None else _filled(store, 0.0)
            for part, store in kept.items()
        }
        return "SI: the anchor is the state without the tasks; the importances, which mix all tasks, were dropped"
