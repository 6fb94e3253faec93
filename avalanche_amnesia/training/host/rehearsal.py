"""Rehearsals: the first steps of a training, taken twice before it begins, must leave the same bits both times.

A claim needs trainings that are functions of the seed, the task and what a task can see. Nobody can list what else may
have a memory: a data set with a generator of its own, a hook of the optimizer, a loss over a global counter. So it is
tried out. Between the two rehearsals, and behind the second one, all is put back that a new task or its seed sets
anyway. What still differs then has a memory beside them.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins.clock import Clock
from torch import Tensor
from torch.utils._pytree import tree_leaves

from avalanche_amnesia.bits import bit_sums
from avalanche_amnesia.optimizers import copied
from avalanche_amnesia.seeding import rng_state, set_rng_state
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import dispatch_to, listens_to_training
from avalanche_amnesia.training.host.rollback import Contents, go_back, is_ours, of_anybody

Seen = list[dict[str, int]]
"""Step by step: name of a tensor → sum of its bits; samples first, then the loss, then the model's."""


def rehearse(strategy: Strategy, steps: int, **kwargs: Any) -> str | None:
    """Reason why a training is not repeatable; None: no memory showed in its first steps. Leaves all as it was."""
    # Plugins of others do not take part, nor do metrics and loggers: they see one training.
    attributes, users = dict(vars(strategy)), []
    try:
        users = _of_the_user(strategy)
        if _changing_samples(strategy, steps):
            return f"{_NOT_REPEATABLE} its data set gave other samples the second time"
        beginning = _Beginning(strategy)
        first, second = (_rehearsed(strategy, beginning, steps, kwargs) for _ in range(2))
    except _UndoneError as error:
        raise error.cause  # noqa: B904 - the fault itself, as without a rehearsal
    except Exception as error:  # whatever a loop, model or loss raises; the training itself raises it again
        return f"the training could not be rehearsed without plugins of others: {type(error).__name__}: {error}"
    finally:
        for contents in users:
            contents.go_back()
        _set_attributes(strategy, attributes, list(vars(strategy)))
    return _difference(first, second)


_NOT_REPEATABLE = "the training is not repeatable:"


def _of_the_user(strategy: Strategy) -> list[Contents]:
    """Contents of data set, network, optimizer and loss beside samples and parameters: there a memory may lie."""
    # Put back at the end only, so that the user's own counters and generators have seen one training.
    model, optimizer = strategy.model, strategy.optimizer
    skip = [strategy, model, strategy.evaluator, *strategy.plugins, *optimizer.param_groups]
    modules = [vars(module) for module in model.modules() if not is_ours(module)]
    learning = [optimizer, strategy._criterion, *(hook for _, hooks in hooks_of(strategy) for hook in hooks)]
    data = Contents([strategy.dataloader, strategy.experience], [*skip, *learning], of_anybody)
    return [Contents(learning, skip, of_anybody, modules, values=True), data]


def hooks_of(strategy: Strategy) -> Iterator[tuple[str, list[Any]]]:
    """Hooks of a model, its parameters, optimizer and loss, and functions in place of their methods, by name."""
    model = strategy.model
    parts = [("optimizer", strategy.optimizer), ("criterion", strategy._criterion)]
    for path, part in (*parts, *model.named_modules(prefix="model"), *model.named_parameters(prefix="model")):
        kinds = {name: getattr(part, name, None) for name in _OF_PARAMETERS} | getattr(part, "__dict__", {})
        for name, value in kinds.items():
            if name.endswith("_hooks") and isinstance(value, dict) and value:
                yield f"{path}.{name}", list(value.values())
            elif name in _METHODS and callable(value):
                yield f"{path}.{name}", [value]


_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = ("step", "zero_grad", "forward", "__call__")
"""Methods in whose place a function may stand."""


class _UndoneError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _changing_samples(strategy: Strategy, steps: int) -> bool:
    """Tell whether an experience that offers its samples as tensors makes other ones when it is asked twice."""
    made = getattr(strategy.experience, "tensors_at", None)
    n = min(len(strategy.experience.dataset), steps * strategy.train_mb_size)
    first, second = (None if made is None else made(torch.arange(n)) for _ in range(2))
    return first is not None and second is not None and bit_sums(first) != bit_sums(second)


def _difference(first: Seen, second: Seen) -> str | None:
    none: dict[str, int] = {}
    for step, (here, there) in enumerate(zip_longest(first, second, fillvalue=none), 1):
        other = next((name for name in here | there if here.get(name) != there.get(name)), None)
        if other is not None and other.startswith(_SAMPLES):
            return f"{_NOT_REPEATABLE} its data gave another mini-batch in step {step} the second time"
        if other is not None:
            return f"{_NOT_REPEATABLE} {other} differed after step {step}"
    return None


def _rehearsed(strategy: Strategy, beginning: "_Beginning", steps: int, kwargs: dict[str, Any]) -> Seen:
    """Take the first steps, and put everything back; returns sums of the bits that they left."""
    # Where an interruption finds it: giving the training up goes back to it first.
    strategy.rollback_point = beginning
    watch = _Watch()
    try:
        dispatch_to(strategy, [*beginning.plugins, watch])
        strategy.dataloader = _FirstBatches(strategy.dataloader, steps)
        strategy.training_epoch(**kwargs)
    except Exception as error:
        if strategy.rollback_point is not beginning:
            raise _UndoneError(error) from error
        raise
    finally:
        go_back(strategy)
    return watch.seen


def _takes_part(plugin: Any) -> bool:
    """Tell whether a plugin takes part in a rehearsal: this package's, but what answers requests, and the clock."""
    ours = is_ours(plugin) and not getattr(plugin, "answers_requests", False)
    return isinstance(plugin, Clock) or (ours and listens_to_training(plugin))


class _FirstBatches:
    """The first mini-batches of a loader, which says to have as many as it has: schedules depend on that."""

    def __init__(self, loader: Any, steps: int) -> None:
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._steps)


_SAMPLES = "mini-batch"


class _Watch(SupervisedPlugin):
    """Notes what every step was given, and what it left."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []

    @torch.no_grad()
    def after_training_iteration(self, strategy: Strategy, **kwargs: Any) -> None:
        """Note sums of bits, which differ where a training differed, and take less time than hashes."""
        leaves = (leaf for leaf in tree_leaves(strategy.mbatch) if isinstance(leaf, Tensor))
        named = {f"{_SAMPLES}[{at}]": leaf for at, leaf in enumerate(leaves)} | {"the loss": strategy.loss.detach()}
        named |= {**dict(strategy.model.named_parameters()), **dict(strategy.model.named_buffers())}
        self.seen.append(dict(zip(named, bit_sums(named.values()), strict=True)))


_MAKERS = ("avalanche.", "torch.", "avalanche_amnesia.")
"""Packages of loaders that are made for one task."""
_OF_A_STEP = ("plugins", "_listeners", "dataloader", "mbatch", "mb_output", "loss", "rollback_point")
"""Attributes of a strategy that the host sets in every step, or a rehearsal; others may be a subclass's memory."""


def _set_attributes(strategy: Strategy, attributes: Mapping[str, Any], names: Iterable[str]) -> None:
    """Give a strategy the attributes that it had, and take away those of some names that it did not have."""
    vars(strategy).update(attributes)  # at once: an interruption leaves all plugins, or those of the rehearsal
    for name in names:
        if name not in attributes:
            vars(strategy).pop(name, None)


class _Beginning:
    """State that a new task or its seed sets anyway: model, optimizer state, random streams, this package's plugins."""

    # Nothing else: an attribute of the optimizer, the loss or a module may be the memory that is looked for.
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._attributes = {name: value for name, value in vars(strategy).items() if name in _OF_A_STEP}
        self.plugins = [plugin for plugin in strategy.plugins if _takes_part(plugin)]
        skip = [strategy, strategy.evaluator, strategy.optimizer, strategy._criterion]
        tensors = (*strategy.model.parameters(), *strategy.model.buffers())
        self._contents = Contents(self.plugins, skip, tensors=tensors)
        # The host makes a loader for every task. Workers that outlive an epoch go on drawing where they stopped.
        self._loader = strategy.dataloader
        self._of_loader = dict(vars(self._loader)) if type(self._loader).__module__.startswith(_MAKERS) else {}
        self._moments = copied(strategy.optimizer.state)
        self._groups = [dict(group) for group in strategy.optimizer.param_groups]
        self._random = rng_state()

    def go_back(self) -> None:
        """Put everything back; to be called again if it was interrupted."""
        _set_attributes(self._strategy, self._attributes, _OF_A_STEP)
        self._contents.go_back()
        if self._of_loader:
            vars(self._loader).update(self._of_loader)
        optimizer = self._strategy.optimizer
        optimizer.state = copied(self._moments)
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        set_rng_state(self._random)
