"""Traits of optimizers: what is known of a step, in the one table in which a new optimizer is judged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import optimizer as optim

# Classes by name, no subclasses: the step of one may divide by a norm, say.
_ENTRYWISE = frozenset((ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop))
_ZERO_RESTS: Mapping[type, Callable[[Mapping[str, Any]], bool]] = {
    SGD: lambda group: not group["momentum"] and not group["weight_decay"],
    Adam: lambda group: not group["weight_decay"] and group["eps"] > 0,
    AdamW: lambda group: not group["weight_decay"] and group["eps"] > 0,
}
"""Class → whether a group's settings let an entry rest whose gradient is 0, and always was."""


@dataclass(frozen=True)
class OptimizerTraits:
    """Traits of an optimizer with the settings that it has now; False where nothing is known.

    Attributes:
        entrywise: every entry moves by its own gradients, whatever the others hold.
        all_in_state: it keeps nothing beside its state, which a new task resets.
        skips_frozen: a parameter without a gradient stays as it is, whatever its decay or momentum.
        zero_rests: an entry whose gradient is 0, and always was, keeps its bits.
        linear: an entry moves by its gradient times one number; it rests whatever came before.
    """

    entrywise: bool
    all_in_state: bool
    skips_frozen: bool
    zero_rests: bool
    linear: bool


def traits_of(optimizer: Optimizer) -> OptimizerTraits:
    """Traits of an optimizer; of its step nothing is known where hooks are called around it."""
    kind = type(optimizer)
    of_torch, hooked = kind.__module__.startswith("torch.optim"), is_hooked(optimizer)
    rests = _ZERO_RESTS.get(kind)
    zero_rests = rests is not None and not hooked and all(map(rests, optimizer.param_groups))
    return OptimizerTraits(
        entrywise=kind in _ENTRYWISE,
        all_in_state=of_torch,
        skips_frozen=of_torch and not hooked,
        zero_rests=zero_rests,
        linear=zero_rests and kind is SGD,
    )


def is_hooked(optimizer: Optimizer) -> bool:
    """Tell whether anything may be done around an optimizer's step: by hooks, or by a function in the method's place.

    torch's schedulers put one there too, which only counts steps.
    """
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any((*hooks, optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)):
        return True
    step = vars(optimizer).get("step")
    only_counts = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not only_counts
