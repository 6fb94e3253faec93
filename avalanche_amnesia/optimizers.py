"""Optimizers: what is known of their steps, which of them can train, what they remember, and others beside them."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
    SparseAdam,
)
from torch.optim import optimizer as optim

FLUSH_EVERY = 25
"""Steps between two looks for numbers that are nearly subnormal."""
FLUSH_BELOW = 2.0**26
"""Times the smallest normal float, below which numbers are set to 0: halved FLUSH_EVERY times they are still normal."""


# The table in which a new optimizer is judged ------------------------------------------------------------------------

# Classes by name, no subclasses: the step of one may divide by a norm, say.
_ENTRYWISE = frozenset((ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop))
_ZERO_RESTS: Mapping[type, Callable[[Mapping[str, Any]], bool]] = {
    SGD: lambda group: not group["momentum"] and not group["weight_decay"],
    Adam: lambda group: not group["weight_decay"] and group["eps"] > 0,
    AdamW: lambda group: not group["weight_decay"] and group["eps"] > 0,
}
"""Class → whether a group's settings let an entry rest whose gradient is 0, and always was."""


class OptimizerTraits(NamedTuple):
    """Traits of an optimizer with the settings that it has now; False where nothing is known."""

    entrywise: bool  # every entry moves by its own gradients, whatever the others hold
    skips_frozen: bool  # a parameter without a gradient stays as it is, whatever its decay or momentum
    zero_rests: bool  # an entry whose gradient is 0, and always was, keeps its bits
    linear: bool  # an entry moves by its gradient times one number; it rests whatever came before


def traits_of(optimizer: Optimizer) -> OptimizerTraits:
    """Traits of an optimizer; of its step nothing is known where hooks are called around it."""
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
    """Tell whether anything may be done around an optimizer's step: by hooks, or by a function in its place."""
    of_torch = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [getattr(optimizer, name, True) for name in of_torch]  # one that wraps another may leave them out
    if any((*hooks, optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)):
        return True
    step = vars(optimizer).get("step")  # torch's schedulers put one there too, which only counts steps
    only_counts = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not only_counts


# The strategy's optimizer, and others beside it ----------------------------------------------------------------------


def check_optimizer(optimizer: Any, own: Iterable[nn.Parameter], new: Iterable[nn.Parameter] = ()) -> None:
    """Check that an optimizer can train a model, task after task."""
    if not isinstance(optimizer, Optimizer):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else repr(optimizer)
        raise TypeError(f"optimizer must be a torch optimizer, got {given}: Adam(model.parameters(), lr=1e-3)")
    name, parameters = type(optimizer).__name__, list(own)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the loss several times a step, through a closure that training on mini-batches does not "
            "give it; take a first-order optimizer, such as Adam(model.parameters(), lr=1e-3)"
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, and those of heads and layers are dense; take Adam, and leave "
            "sparse=True of embedding layers out"
        )
    if isinstance(optimizer, Adagrad) and not can_begin_anew(optimizer):
        raise ValueError(
            f"Adagrad of torch {torch.__version__} can't step once its state is emptied, which the host does between "
            "tasks; take a newer torch, or another optimizer, such as Adam"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, parameters)):
        raise ValueError(
            f"{name} holds none of the model's parameters: make it from those of the model that you give, "
            f"{name}(model.parameters(), …), once the model is made"
        )
    learning = [parameter for parameter in (*parameters, *new) if parameter.requires_grad]
    if _can_step(optimizer, 2) and not all(_can_step(optimizer, n) for n in {p.dim() for p in learning}):
        raise ValueError(
            f"{name} steps matrices alone, and the model has parameters that are none (biases of layers or heads, "
            f"convolutions), which the host adds to it; take an optimizer for all of them, such as Adam or SGD"
        )


def check_sibling(optimizer: Optimizer, option: str) -> None:
    """Check that an optimizer of the same class and settings can be made for a vector."""
    if not _can_step(optimizer, 1):
        name = type(optimizer).__name__
        raise ValueError(
            f"no {name} can be made for one vector, which is to be stepped beside the model: give "
            f"{option}=lambda parameters: torch.optim.Adam(parameters, lr=0.05)"
        )


def _can_step(optimizer: Optimizer, dimensions: int) -> bool:
    """Tell whether another of the same class and settings takes a parameter of so many dimensions."""
    try:
        sibling_optimizer(optimizer, [nn.Parameter(torch.zeros((1,) * dimensions))])
    except Exception:  # whatever the class raises: Muon a ValueError, one that needs more arguments a TypeError
        return False
    return True


def can_begin_anew(optimizer: Optimizer) -> bool:
    """Tell whether another of the same class and settings steps on without the state that it made when it was built."""
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
    """A new optimizer of the same class and settings, over other parameters."""
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in {**optimizer.defaults, **changed}.items() if name in known}
    return type(optimizer)(parameters, **settings)


def copied(state: Mapping[Tensor, Any]) -> defaultdict[Tensor, Any]:
    """Copy of an optimizer's state, which keeps its parameters."""
    return defaultdict(dict, {parameter: deepcopy(held) for parameter, held in state.items()})


_OWN_STEPS: Mapping[type, Callable[..., Any]] = {kind: inspect.unwrap(kind.step) for kind in (Adam, AdamW)}
"""Class → torch's own step, which somebody may replace for all optimizers of the class."""


@torch.no_grad()
def step_by_kernel(optimizer: Optimizer) -> bool:
    """Step a fused Adam by its kernel alone; False, and nothing done, where torch's own step has more to do."""
    # What torch does around the kernel takes as long as the step of some thousand numbers.
    own = _OWN_STEPS.get(type(optimizer))
    if own is None or inspect.unwrap(type(optimizer).step) is not own:
        return False
    if "step" in vars(optimizer) or is_hooked(optimizer):
        return False
    calls = []
    for group in optimizer.param_groups:
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        state = [optimizer.state[parameter] for parameter in stepped]
        numbers = not any(isinstance(setting, Tensor) for setting in (group["lr"], *group["betas"]))
        alike = len({(parameter.dtype, parameter.device) for parameter in stepped}) == 1
        if not (group["fused"] and numbers and alike and all(state)) or group["amsgrad"]:
            return False
        calls.append((group, stepped, state))
    for group, stepped, state in calls:
        steps = [held["step"] for held in state]
        torch._foreach_add_(steps, 1)
        (torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_)(
            stepped,
            [parameter.grad for parameter in stepped],
            [held["exp_avg"] for held in state],
            [held["exp_avg_sq"] for held in state],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
        )
    return True


class BareStep:
    """Step of an optimizer, for where no gradients are recorded, which flushes subnormal numbers too."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._step = inspect.unwrap(type(optimizer).step)  # profiling hooks cost more than the step of few numbers

    def __call__(self) -> None:
        if not step_by_kernel(self.optimizer):
            self._step(self.optimizer)
        self.steps += 1
        flush_denormals(self.optimizer, self.steps)

    def way_back(self) -> Callable[[], None]:
        """A function that puts the optimizer's state and the number of steps back to what they are now."""
        steps, moments = self.steps, copied(self.optimizer.state)

        def go_back() -> None:
            self.steps, self.optimizer.state = steps, copied(moments)

        return go_back


def flushed_below(dtype: torch.dtype) -> float:
    """Magnitude up to which numbers are cleared; 0 for float16, where useful numbers lie so near the smallest ones."""
    return 0.0 if dtype == torch.float16 else FLUSH_BELOW * torch.finfo(dtype).tiny


def flush_denormals(optimizer: Optimizer, step: int) -> None:
    """Set, every :data:`FLUSH_EVERY` steps, what is nearly subnormal in parameters and in an optimizer's state to 0."""
    # Closed units get no gradient for most of an epoch. A momentum of 0.9 falls below the smallest normal float within
    # 800 steps and stays there; under Adam with weight decay the parameter does so too. Common processors compute
    # several times as slowly with such numbers. Every entry counts by itself: where in a tensor a unit lies must not
    # matter.
    if step % FLUSH_EVERY:
        return
    for parameter, state in optimizer.state.items():
        if parameter.grad is not None:
            for value in (parameter.data, *state.values()):
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    torch.ops.aten.hardshrink.out(value, flushed_below(value.dtype), out=value)


def follow_model(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    known: Mapping[str, nn.Parameter],
    *,
    fresh: bool,
    begins_as: Callable[[str], str] = str,
) -> None:
    """Make an optimizer step a model's parameters: new ones join it, those that the model lost leave it.

    A new one joins the group of the parameter as which it begins (``begins_as`` of its name), or the first group. The
    host's ``update_optimizer`` knows no place for a new head where there are several groups. What never was a parameter
    of the model (a criterion's, say) stays.
    """
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
        group = group_of.get(id(parameters.get(begins_as(name))), optimizer.param_groups[0])
        group["params"].append(parameter)
    optimizer.state.update({parameter: {} for parameter in new.values()})
    if fresh:
        optimizer.state = defaultdict(dict)
