"""First steps of a training, taken twice before it begins and put back; their bits tell two trainings apart.

Between the two, and after the second, everything is restored that a new task or its seed sets anyway. If the bits still
differ, the training has a memory of its own, and no other run may share its states.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.utils import trigger_plugins
from torch import Tensor
from torch.utils._pytree import tree_leaves

from avalanche_amnesia.bits import bit_sums, tensor_hash
from avalanche_amnesia.optimizers import copied
from avalanche_amnesia.seeding import preserved_rng, rng_state, set_rng_state
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.listening import dispatch_to, listens_to_training
from avalanche_amnesia.training.host.parts_of_tasks import set_attributes
from avalanche_amnesia.training.host.rollback import Contents, go_back, is_ours, of_anybody
from avalanche_amnesia.training.host.states import before_loading
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.unlearning.assumptions import hooks_of

Seen = Sequence[Mapping[str, int | str]]
"""Step by step: name of a tensor → hash of a sample or the loss, sum of the bits of a tensor of the model."""


@dataclass(frozen=True)
class Rehearsal:
    """Outcome of the first steps of a training."""

    reason: str | None  # why the training is not repeatable, or could not begin; None: no memory showed
    seen: Seen = ()


def rehearse_task(strategy: Strategy, experience: Any, steps: int, **options: Any) -> Rehearsal:
    """Begin the training of a task, rehearse it, and put all back; only this package's plugins take part."""
    plugins = [plugin for plugin in strategy.plugins if _is_rehearsed(plugin)]
    go_back = before_loading(strategy, [strategy.optimizer, strategy._criterion, *plugins])

    def begun() -> Rehearsal:
        host: Any = strategy  # of which these are no public methods
        host.model.to(host.device).train()
        host._before_training(**options)
        host._before_training_exp(**options)
        host._before_training_epoch(**options)
        return rehearse(strategy, steps, **options)

    return _unnoticed(strategy, experience, plugins, begun, go_back)


def look_at_task(strategy: Strategy, experience: Any, steps: int, **options: Any) -> Rehearsal:
    """As :func:`rehearse_task`, but the mini-batches are only looked at, and the strategy's state has no part in it."""
    plugins = [plugin for plugin in strategy.plugins if isinstance(plugin, SeedingPlugin)]

    def begun() -> Rehearsal:
        host: Any = strategy
        host._before_train_dataset_adaptation(**options)
        SupervisedTemplate.train_dataset_adaptation(host)  # Cumulative's own adds what it has seen
        host.make_train_dataloader(**options)
        trigger_plugins(strategy, "before_training_exp", **options)
        random, seen = rng_state(), []
        for _ in range(2):
            set_rng_state(random)
            seen.append([_hashes_of(batch) for batch in islice(strategy.dataloader, steps)])
        return Rehearsal(_difference(*seen), seen[0])

    return _unnoticed(strategy, experience, plugins, begun, Contents(plugins, [strategy]).go_back)


def _unnoticed(
    strategy: Strategy,
    experience: Any,
    plugins: list[Any],
    begun: Callable[[], Rehearsal],
    go_back: Callable[[], None],
) -> Rehearsal:
    """Begin a training with some plugins only, and put everything back."""
    attributes, data = dict(vars(strategy)), Contents([experience], [strategy], of_anybody)
    with preserved_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the training itself warns
        try:
            dispatch_to(strategy, plugins)
            vars(strategy).update(experience=experience, is_training=True, _stop_training=False)
            return begun()
        except Exception as error:  # whatever refuses the task; the training itself raises it again
            return Rehearsal(f"the training could not begin without plugins of others: {type(error).__name__}: {error}")
        finally:
            go_back()
            data.go_back()
            set_attributes(strategy, attributes)


def rehearse(strategy: Strategy, steps: int, **kwargs: Any) -> Rehearsal:
    """Take the first steps of a training that has begun, twice. Leaves all as it was."""
    # Plugins of others do not take part, nor do metrics and loggers: they see one training.
    try:
        with _put_back(strategy):
            beginning = _Beginning(strategy)
            loader = _FirstBatches(strategy.dataloader, steps)
            watch, again = (_rehearsed(strategy, beginning, loader, kwargs) for _ in range(2))
    except _UndoneError as error:
        raise error.__cause__ or error  # noqa: B904 - the fault itself, as without a rehearsal
    except Exception as error:  # whatever a loop, model or loss raises; the training itself raises it again
        fault = error.__cause__ or error
        return Rehearsal(
            f"the training could not be rehearsed without plugins of others: {type(fault).__name__}: {fault}"
        )
    return Rehearsal(_difference(watch.seen, again.seen), watch.seen)


_NOT_REPEATABLE = "the training is not repeatable:"


@contextmanager
def _put_back(strategy: Strategy) -> Iterator[None]:
    """Put attributes of a strategy back, and what data set, network, optimizer and loss hold: there a memory may lie.

    Samples and parameters are not looked at.
    """
    # Put back at the end only, so that the user's own counters and generators have seen one training.
    attributes, model, optimizer = dict(vars(strategy)), strategy.model, strategy.optimizer
    skip = [strategy, model, strategy.evaluator, *strategy.plugins, *optimizer.param_groups]
    modules = [vars(module) for module in model.modules() if not is_ours(module)]
    learning = [optimizer, strategy._criterion, *(hook for _, hooks in hooks_of(strategy) for hook in hooks)]
    data = Contents([strategy.dataloader, strategy.experience], [*skip, *learning], of_anybody)
    others = Contents(learning, skip, of_anybody, modules, values=True)
    try:
        yield
    finally:
        others.go_back()
        data.go_back()
        set_attributes(strategy, attributes)


class _UndoneError(Exception):
    """A training was given up in its rehearsal, for the error that caused this one."""


def _difference(first: Seen, second: Seen) -> str | None:
    none: dict[str, int | str] = {}
    for step, (here, there) in enumerate(zip_longest(first, second, fillvalue=none), 1):
        other = next((name for name in {**here, **there} if here.get(name) != there.get(name)), None)
        if other is not None and other.startswith(_SAMPLES):
            return f"{_NOT_REPEATABLE} its data gave another mini-batch in step {step} the second time"
        if other is not None:
            return f"{_NOT_REPEATABLE} {other} differed after step {step}"
    return None


def _rehearsed(strategy: Strategy, beginning: "_Beginning", loader: Any, kwargs: dict[str, Any]) -> "_Watch":
    """Take steps on a loader's mini-batches, and put everything back; returns what was noticed of them."""
    # Where an interruption finds it: giving the training up goes back to it first.
    strategy.rollback_point = beginning
    watch = _Watch()
    try:
        dispatch_to(strategy, [*beginning.plugins, watch])
        strategy.dataloader = loader
        strategy.training_epoch(**kwargs)
    except Exception as error:
        if strategy.rollback_point is not beginning:
            raise _UndoneError from error
        raise
    finally:
        go_back(strategy)
    return watch


def _is_rehearsed(plugin: Any) -> bool:
    """Tell whether a plugin may take part in a rehearsal: this package's, but what answers requests, and the clock."""
    return isinstance(plugin, Clock) or (is_ours(plugin) and not getattr(plugin, "answers_requests", False))


class _FirstBatches:
    """The first mini-batches of a loader, which says to have as many as it has: schedules depend on that."""

    def __init__(self, loader: Any, steps: int) -> None:
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._steps)


_SAMPLES = "mini-batch"


def _hashes_of(batch: Any) -> dict[str, int | str]:
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return {f"{_SAMPLES}[{at}]": tensor_hash(leaf) for at, leaf in enumerate(leaves)}


class _Watch(SupervisedPlugin):
    """Notes what every step was given, and what it left."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, int | str]] = []

    @torch.no_grad()
    def after_training_iteration(self, strategy: Strategy, **kwargs: Any) -> None:
        """Note hashes of samples and loss; of the model sums of bits, which take less time."""
        named = {**dict(strategy.model.named_parameters()), **dict(strategy.model.named_buffers())}
        step = _hashes_of(strategy.mbatch) | {"the loss": tensor_hash(strategy.loss)}
        self.seen.append(step | dict(zip(named, bit_sums(named.values()), strict=True)))


_MAKERS = ("avalanche.", "torch.", "avalanche_amnesia.")
"""Packages of loaders that are made for one task."""
_OF_A_STEP = ("plugins", "_listeners", "dataloader", "mbatch", "mb_output", "loss", "rollback_point")
"""Attributes of a strategy that the host sets in every step, or a rehearsal; others may be a subclass's memory."""


class _Beginning:
    """State that a new task or its seed sets anyway: model, optimizer state, random streams, this package's plugins."""

    # Nothing else: an attribute of the optimizer, the loss or a module may be the memory that is looked for.
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._attributes = {name: value for name, value in vars(strategy).items() if name in _OF_A_STEP}
        heard = (plugin for plugin in strategy.plugins if isinstance(plugin, Clock) or listens_to_training(plugin))
        self.plugins = [plugin for plugin in heard if _is_rehearsed(plugin)]
        skip = [strategy, strategy.evaluator, strategy.optimizer, strategy._criterion]
        tensors = (*strategy.model.parameters(), *strategy.model.buffers())
        self._contents = Contents(self.plugins, skip, parts=strategy.optimizer.param_groups, tensors=tensors)
        # The host makes a loader for every task. Workers that outlive an epoch go on drawing where they stopped.
        self._loader = strategy.dataloader
        self._of_loader = dict(vars(self._loader)) if type(self._loader).__module__.startswith(_MAKERS) else {}
        self._moments = copied(strategy.optimizer.state)
        self._random = rng_state()

    def go_back(self) -> None:
        """Put everything back; to be called again if it was interrupted."""
        set_attributes(self._strategy, self._attributes, _OF_A_STEP)
        self._contents.go_back()
        if self._of_loader:
            vars(self._loader).update(self._of_loader)
        self._strategy.optimizer.state = copied(self._moments)
        set_rng_state(self._random)
