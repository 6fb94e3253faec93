"""Optimizers: properties of their steps, checks before training, and copies with the same settings."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam
from torch.optim import optimizer as optimizer_module

from avalanche_amnesia import checks
from avalanche_amnesia.strategy import Strategy

FLUSH_EVERY = 25
"""Number of optimizer steps between two searches for nearly subnormal numbers."""
FLUSH_BELOW = 2.0**26
"""Numbers below this many smallest normal floats become 0; larger ones stay normal if halved FLUSH_EVERY times."""


# Traits of known optimizers ------------------------------------------------------------------------------------------

# Only these classes, no subclasses, because the step of a subclass may, for example, divide by a norm.
_ENTRYWISE = {SGD, Adagrad, Adam, AdamW, optim.ASGD, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam}
_ENTRYWISE |= {optim.RMSprop, optim.Rprop}
_ZERO_RESTS: Mapping[type, Callable[[Mapping[str, Any]], bool]] = {
    SGD: lambda group: not group["momentum"] and not group["weight_decay"],
    Adam: lambda group: not group["weight_decay"] and group["eps"] > 0,
    AdamW: lambda group: not group["weight_decay"] and group["eps"] > 0,
}
"""Class → function of a parameter group; it returns True if an entry never changes while all its gradients are 0."""


class OptimizerTraits(NamedTuple):
    """Properties of an optimizer's step with its current settings; a property not known to hold is False."""

    entrywise: bool  # a step changes each entry by its own gradients only
    skips_frozen: bool  # a parameter without a gradient keeps its value despite decay or momentum
    zero_rests: bool  # an entry keeps its bits while all its gradients so far are 0
    linear: bool  # a step adds a multiple of the gradient; a zero gradient changes nothing


def traits_of(optimizer: Optimizer) -> OptimizerTraits:
    """Return properties of an optimizer's step, such as ``linear``; all are False if hooks run around the step."""
    kind = type(optimizer)
    of_torch, hooked = kind.__module__.startswith("torch.optim"), is_hooked(optimizer)
    rests = _ZERO_RESTS.get(kind)
    zero_rests = rests is not None and not hooked and all(map(rests, optimizer.param_groups))
    return OptimizerTraits(
        entrywise=kind in _ENTRYWISE and not hooked,
        skips_frozen=of_torch and not hooked,
        zero_rests=zero_rests,
        linear=zero_rests and kind is SGD,
    )


def is_hooked(optimizer: Optimizer) -> bool:
    """Return True if hooks or a replaced ``step`` method may run code around an optimizer's step."""
    of_torch = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [getattr(optimizer, name, True) for name in of_torch]  # a wrapper may lack these attributes
    if any((*hooks, optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks)):
        return True
    step = vars(optimizer).get("step")  # torch's schedulers replace it too, but only count steps
    only_counts = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not only_counts


# Checks, and optimizers with the same settings -----------------------------------------------------------------------


def check_optimizer(optimizer: Any, own: Iterable[nn.Parameter], new: Iterable[nn.Parameter] = ()) -> None:
    """Raise TypeError or ValueError unless an optimizer can train parameters ``own``, and ``new`` ones added later."""
    checks.instance("optimizer", optimizer, Optimizer, "Adam(model.parameters(), lr=1e-3)")
    name, parameters = type(optimizer).__name__, list(own)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the loss several times a step, through a closure that training on mini-batches does not "
            "give it; take a first-order optimizer, such as Adam(model.parameters(), lr=1e-3)"
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError("SparseAdam takes sparse gradients alone: take Adam, and embedding layers without sparse=True")
    if isinstance(optimizer, Adagrad) and not can_restart(optimizer):
        raise ValueError(f"Adagrad of torch {torch.__version__} can't start again: take a newer torch, or Adam")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, parameters)):
        raise ValueError(f"{name} has none of the model's parameters: make it from them, {name}(model.parameters(), …)")
    learning = [parameter for parameter in (*parameters, *new) if parameter.requires_grad]
    if _can_step(optimizer, 2) and not all(_can_step(optimizer, n) for n in {p.dim() for p in learning}):
        raise ValueError(
            f"{name} steps matrices alone, and the model has parameters that are none (biases of layers or heads, "
            f"convolutions), which the host adds to it; take an optimizer for all of them, such as Adam or SGD"
        )


def check_trains_vectors(optimizer: Optimizer, option: str) -> None:
    """Raise ValueError, with advice to set ``option``, if no optimizer of this class can train a vector."""
    if not _can_step(optimizer, 1):
        name = type(optimizer).__name__
        raise ValueError(
            f"no {name} can be made for a vector: {option}=lambda parameters: torch.optim.Adam(parameters, lr=0.05)"
        )


def _can_step(optimizer: Optimizer, dimensions: int) -> bool:
    """Return True if the class of ``optimizer``, with the same settings, accepts parameters of ``dimensions`` axes."""
    try:
        sibling_optimizer(optimizer, [nn.Parameter(torch.zeros((1,) * dimensions))])
    except Exception:  # Muon raises ValueError; a class with more required arguments raises TypeError
        return False
    return True


def can_restart(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` could still take steps after its state was cleared (tried on a copy)."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    other = sibling_optimizer(optimizer, [parameter])
    other.state.clear()
    try:
        other.step()
    except KeyError:
        return False
    return True


def sibling_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter], **changed: Any) -> Optimizer:
    """Return a new optimizer for ``parameters`` of the same class and with the same settings, except ``changed``."""
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in {**optimizer.defaults, **changed}.items() if name in known}
    return type(optimizer)(parameters, **settings)


def copy_state(state: Mapping[Tensor, Any]) -> defaultdict[Tensor, Any]:
    """Return a copy of an optimizer's ``state``: the values are deep copies, the keys the same parameter objects."""
    return defaultdict(dict, {parameter: deepcopy(held) for parameter, held in state.items()})


class BareStep:
    """Callable that steps an optimizer without hooks, and sets nearly subnormal numbers to 0; needs ``no_grad``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._step = inspect.unwrap(type(optimizer).step)  # without profiling hooks, which are slow for small models

    def __call__(self) -> None:
        self._step(self.optimizer)
        self.steps += 1
        flush_denormals(self.optimizer, self.steps)


def flush_denormals(optimizer: Optimizer, step: int) -> None:
    """Every :data:`FLUSH_EVERY` steps, set nearly subnormal parameters and optimizer states to 0, for speed on CPUs."""
    # Closed units get no gradient for most of an epoch. Their momentum of 0.9 falls below the smallest normal float
    # within 800 steps; under Adam with weight decay the parameter does so too. Common processors compute several times
    # more slowly with subnormal numbers. Each entry is tested separately: a unit's place in a tensor must not matter.
    if step % FLUSH_EVERY:
        return
    for parameter, state in optimizer.state.items():
        if parameter.grad is not None:
            for value in (parameter.data, *state.values()):
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    half = value.dtype == torch.float16  # its useful numbers are small
                    below = 0.0 if half else FLUSH_BELOW * torch.finfo(value.dtype).tiny
                    torch.ops.aten.hardshrink.out(value, below, out=value)


def follow_model(strategy: Strategy, *, fresh: bool) -> None:
    """Add the model's new parameters to a strategy's optimizer, and remove those that the model no longer has.

    A new parameter joins the group of the parameter that provides its initial values (the model's ``begins_as``), or
    the first one. Avalanche's ``update_optimizer`` cannot choose among several groups for a new head. Parameters that
    never belonged to the model (of a criterion, for example) stay. ``fresh``: the optimizer gets an empty state.
    """
    optimizer, parameters = strategy.optimizer, dict(strategy.model.named_parameters())
    known = getattr(strategy, "optimized_param_id", None) or {}
    here = {id(parameter) for parameter in parameters.values()}
    heirs = {id(old): parameters.get(name) for name, old in known.items() if id(old) not in here}
    for group in optimizer.param_groups:
        heirs_and_others = [heirs.get(id(parameter), parameter) for parameter in group["params"]]
        group["params"] = [parameter for parameter in heirs_and_others if parameter is not None]
    for old in [old for old in optimizer.state if id(old) in heirs]:
        del optimizer.state[old]
        heir = heirs[id(old)]
        if heir is not None:
            optimizer.state[heir] = {}
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    new = {name: parameter for name, parameter in parameters.items() if id(parameter) not in group_of}
    for name, parameter in new.items():
        group = group_of.get(id(parameters.get(strategy.model.begins_as(name))), optimizer.param_groups[0])
        group["params"].append(parameter)
    optimizer.state.update({parameter: {} for parameter in new.values()})
    if fresh:
        optimizer.state = defaultdict(dict)
    strategy.optimized_param_id = parameters
