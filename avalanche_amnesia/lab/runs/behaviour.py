"""Facts that a training depends on and no setting shows: hooks, replaced methods, values of tensors."""

from typing import Any

import torch

from avalanche_amnesia.bits import bit_sums
from avalanche_amnesia.models.task_store import Parts
from avalanche_amnesia.object_walk import memory_of
from avalanche_amnesia.saving.strategy_settings import learning_settings
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import listens
from avalanche_amnesia.training.host.rehearsal import hooks_of
from avalanche_amnesia.training.host.rollback import is_ours


def facts_of(strategy: Strategy) -> dict[str, Any]:
    """By name, what a step begins with, and what may not change between two steps of a run."""
    model, optimizer = strategy.model, strategy.optimizer
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    facts: dict[str, Any] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts |= {f"{name}.requires_grad": p.requires_grad for name, p in model.named_parameters()}
    for at, group in enumerate(optimizer.param_groups):
        place = f"optimizer.param_groups[{at}]"
        facts |= {f"{place}.{name}": repr(value) for name, value in group.items() if name != "params"}
        facts[f"{place}.params"] = [names.get(id(parameter), "another") for parameter in group["params"]]
    for parameter, moments in optimizer.state.items():
        place = f"optimizer.state of {names.get(id(parameter), 'another')}"
        for name, value in moments.items():
            (tensors if isinstance(value, torch.Tensor) else facts)[f"{place}: {name}"] = value
    settings = learning_settings(strategy).items()
    facts |= {f"{of}.{name}": repr(value) for of, own in settings for name, value in own.items()}
    others = [(f"model.{path}", module) for path, module in model.named_modules() if not is_ours(module)]
    others += [(type(plugin).__name__, plugin) for plugin in strategy.plugins if _is_a_script_s(plugin)]
    held = ((f"{path}.{name}", value) for path, thing in others for name, value in vars(thing).items())
    facts |= {place: repr(value) for place, value in held if isinstance(value, (int, float, str)) or callable(value)}
    skip = [strategy, optimizer, strategy.evaluator, *strategy.plugins]
    facts |= dict(memory_of(strategy._criterion, "criterion", skip, Parts(model)))
    facts |= zip(tensors, bit_sums(tensors.values()), strict=True)  # take less time than hashes
    facts |= {name: [id(hook) for hook in hooks] for name, hooks in hooks_of(strategy)}
    return {name: fact for name, fact in facts.items() if not name.endswith(".training")}  # evaluations change it


def _is_a_script_s(plugin: Any) -> bool:
    """Tell whether a plugin is the script's own, and no evaluation can change it."""
    evaluates = any("_eval" in event and listens(plugin, event) for event in dir(plugin))
    return not evaluates and not type(plugin).__module__.startswith("avalanche")
