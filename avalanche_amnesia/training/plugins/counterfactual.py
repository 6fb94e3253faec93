"""Heads precomputed for each set of earlier tasks that may be unlearned (``compensation="counterfactual"``)."""

import random
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, ClassVar

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.saving.encoding import Apart
from avalanche_amnesia.saving.values import checked, made
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.head_fit import (
    MOST_SAMPLES,
    STATISTICS_BATCHES,
    CounterfactualFeatures,
    compacted,
    fitted_head,
)
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.norm_statistics import running_norms
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.task_faults import samples_at, training_samples
from avalanche_amnesia.trajectory.removal import Moved, Removal
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import FitError

MOST_HELD = 2**22
"""Parameters up to which what goes with each task is held while heads are fitted."""
SEVERAL = frozenset({-1})
"""Key of the head for any set of several tasks."""
_NAME = "_shared_head.weight"
_WEIGHT = f"backbone.{_NAME}"


class _WithoutTasks:
    """A model without some of its tasks, for a while.

    Where no two of them wrote the same entry, any set of them takes with it what each one does, which is worked out
    once.
    """

    def __init__(self, model: TaskMaskedModel, trajectory: Trajectory, tasks: Collection[int]) -> None:
        self.model, self._trajectory = model, trajectory
        self._parameters = {name: p.detach() for name, p in model.backbone.named_parameters(prefix="backbone")}
        few = sum(p.numel() for p in self._parameters.values()) <= MOST_HELD
        self._apart = few and not trajectory.repairs and _disjoint(map(trajectory.moved, tasks))
        self._of_one: dict[int, Mapping[str, Moved]] = {}

    @contextmanager
    def taken_out(self, gone: Collection[int]) -> Iterator[None]:
        """The backbone's values without some tasks, for the length of a block; then as they were, bit for bit."""
        moved = [(self._parameters[name], of) for removal in self._removals(gone) for name, of in removal.items()]
        try:
            for parameter, of in moved:
                of.take_out(parameter)
            yield
        finally:
            for parameter, of in moved:
                of.put_back(parameter)

    def _removals(self, gone: Collection[int]) -> list[Mapping[str, Moved]]:
        # Worked out and not applied: the logs stay as they are, and nothing but the backbone's values has to go back.
        if not self._apart:
            return [self._trajectory.remove(tuple(gone), self._parameters).moved]
        for task in gone:
            if task not in self._of_one:
                self._of_one[task] = self._trajectory.remove((task,), self._parameters).moved
        return [self._of_one[task] for task in gone]


def _disjoint(choices: Iterable[Mapping[str, Tensor]]) -> bool:
    """Tell whether no two choices of entries, by tensor, have one in common."""
    taken: dict[str, Tensor] = {}
    for chosen in choices:
        for name, where in chosen.items():
            if name in taken and bool((taken[name] & where).any()):
                return False
            taken[name] = taken[name] | where if name in taken else where
    return True


class CounterfactualPlugin(SupervisedPlugin):
    """Fits, when a task ends, its head for every earlier task that may be unlearned, and one for several of them.

    While the task's data is still at hand, the updates of an earlier task are taken out of the backbone for a forward
    pass, the head is fitted to the features that are left, and the backbone is put back bit for bit. An unlearning
    then only swaps heads: no data is kept, and a training step costs nothing. Only tasks whose updates the task's mask
    reads count; heads for what can't go any more (a task became permanent) are dropped, and so are heads that were
    fitted in the presence of a task that was unlearned without them.

    Up to three such tasks, every set of them has a head of its own. Of more, all sets of several share one: it is
    fitted to samples in parts, each through the backbone without another set, and serves whatever goes together or one
    after the other. So a task has one head more than there are tasks that may go, and this one has seen features with
    some of those that are gone.

    All heads are for a backbone without repairs: a repair goes with the next request (:class:`RepairPlugin`). A task
    that reads what one changed gets a head for the empty set too: nothing else of what it reads may go. A head that
    can't be fitted, because the features that are left overflow, is left out with a warning.

    Needs :class:`TrajectoryPlugin` and :class:`UnlearningPlugin` beside it and a masked model.

    Args:
        samples: at most so many of the task's training samples are used, at least 1; fewer where these would take more
            than 2 GiB of memory.
        seed: their choice derives from it and the task.

    Attributes:
        heads: task → set of earlier tasks that are gone, or ``SEVERAL``, → :class:`FittedHead`.
        sources: task → earlier tasks whose updates it reads, and that could be unlearned when it was trained.

    Raises:
        ValueError: for a value that is not allowed; before a training, without a :class:`TrajectoryPlugin`.
        TypeError: before a training, if the model has no masks.
    """

    most_apart: ClassVar[int] = 3
    """Tasks of which every set has a head of its own."""

    def __init__(self, *, samples: int = MOST_SAMPLES, seed: int = 0) -> None:
        super().__init__()
        self.samples, self.seed = checks.whole_number("samples", samples), checks.whole_number("seed", seed, None)
        self.heads: dict[int, dict[frozenset[int], FittedHead]] = {}
        self.sources: dict[int, frozenset[int]] = {}

    def state(self) -> dict[str, Any]:
        """State to save: the heads, and what they are for."""
        heads = {task: Apart(partial(_plain, of), (*of, *of.values())) for task, of in self.heads.items()}
        return {"heads": heads, "sources": self.sources}

    def load_state(self, state: Any) -> None:
        """Take back what :meth:`state` returned."""
        kinds = {"heads": dict[int, dict[frozenset[int], dict]], "sources": dict[int, frozenset[int]]}
        heads, sources = checked(state, **kinds)
        made_heads = {task: {gone: made(FittedHead, head) for gone, head in of.items()} for task, of in heads.items()}
        self.heads, self.sources = made_heads, sources

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Check the model and the plugins beside it, before anything of the task is made."""
        if not isinstance(strategy.model, TaskMaskedModel):
            raise TypeError(
                f"counterfactual heads need a model with masks, got {type(strategy.model).__name__}: where later tasks "
                "change what a task reads, a head that was fitted in advance no longer fits"
            )
        if find_plugin(strategy, TrajectoryPlugin) is None:
            raise ValueError(
                f"{type(self).__name__}() needs TrajectoryPlugin() and UnlearningPlugin() beside it, for what earlier "
                "tasks changed: AmnesiacHAT(compensation='counterfactual')"
            )

    @torch.no_grad()
    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Fit the heads of a task that has just been trained."""
        self._drop_impossible(unlearnable)
        model, recorder = strategy.model, find_plugin(strategy, TrajectoryPlugin)
        assert recorder is not None
        trajectory = recorder.trajectory
        use = dict(model.entries_of(task))
        # Where entries that others read stay (WSN), no earlier task takes anything from this one when it goes.
        sources = frozenset(
            earlier
            for earlier in unlearnable
            if earlier != task and not model.keeps_shared_entries and _reads(use, self._moved(trajectory, earlier))
        )
        self.sources[task], self.heads[task] = sources, {}
        removals = _sets(sources, self.most_apart)
        if _reads(use, trajectory.moved_with(())):
            removals.append(frozenset())  # whatever is requested next, the repair goes with it
        if not removals:
            return
        seed, masking = derive_seed(self.seed, "counterfactual", task), find_plugin(strategy, TaskMaskPlugin)
        unsure = None if masking is None else masking.unsure
        if unsure is not None and len(unsure) <= self.samples:
            x, y = samples_at(strategy, unsure)
        else:
            x, y = training_samples(strategy, self.samples, seed)
        seen = []
        if running_norms(model.task_parts(task)):
            size = strategy.train_mb_size
            drawn, _ = training_samples(strategy, STATISTICS_BATCHES * size, seed)
            seen = [some for some in drawn.split(size) if len(some) > 1]
        without = _WithoutTasks(model, trajectory, sources)
        features_now = CounterfactualFeatures(model, task, x, seen)
        for gone in (frozenset[int](), sources) if len(removals) > 1 else ():  # a unit is mostly as in either of these
            with self._as_if_unlearned(without, gone):
                features_now(slice(1))
        labels, unfitted = y.to(features_now.x.device), dict[frozenset[int], str]()
        for gone in removals:
            try:
                head = self._fitted(without, features_now, labels, gone)
            except FitError as error:  # costs this head, and not the task that was trained
                unfitted[gone] = str(error)
                continue
            if head is not None:
                self.heads[task][gone] = self._kept(head)
        if unfitted:
            reasons = "; ".join(
                f"without {'several' if gone == SEVERAL else sorted(gone)}: {reason}"
                for gone, reason in unfitted.items()
            )
            warnings.warn(
                f"task {task} has no head for {len(unfitted)} of {len(removals)} sets of tasks that may be "
                f"unlearned ({reasons}). Unlearning such a set leaves it the head that it has, and the record names it "
                "as affected",
                stacklevel=2,
            )

    def _fitted(
        self, without: _WithoutTasks, features_now: CounterfactualFeatures, labels: Tensor, gone: frozenset[int]
    ) -> FittedHead | None:
        """Head for the model without some tasks."""
        model, task = without.model, features_now.task
        if gone != SEVERAL:
            with self._as_if_unlearned(without, gone):
                statistics = features_now()
                head = fitted_head(model, task, features_now.features, labels, gone)
        else:
            sources = self.sources[task]
            sets = _some_sets(sources, derive_seed(self.seed, "several", task))[: len(labels)]
            for number, lost in enumerate(sets):
                with self._as_if_unlearned(without, lost):
                    statistics = features_now(slice(number, None, len(sets)))
            with self._as_if_unlearned(without, sources):
                head = fitted_head(model, task, features_now.features, labels, sources)
        return None if head is None else replace(head, statistics=statistics)

    def _as_if_unlearned(self, without: _WithoutTasks, gone: Collection[int]) -> AbstractContextManager[None]:
        """The model as if some tasks had been unlearned, for the length of a block; then as it was, bit for bit."""
        return without.taken_out(gone)

    def _moved(self, trajectory: Trajectory, task: int) -> Mapping[str, Tensor]:
        """Tensor name → bool tensor of the entries that go with a task."""
        return trajectory.moved(task)

    def _kept(self, head: FittedHead) -> FittedHead:
        """A fitted head as it is kept."""
        return compacted(head)

    def _swap(self, model: TaskMaskedModel, task: int, fitted: FittedHead, change: Transaction) -> None:
        """Put a fitted head in the place of the task's."""
        for tensor, value in fitted.places(model, task):
            change.write(tensor, value)

    def _drop_impossible(self, unlearnable: Iterable[int]) -> None:
        possible = frozenset(unlearnable)
        self.sources = {task: sources & possible for task, sources in self.sources.items()}
        self.heads = {
            task: {g: head for g, head in heads.items() if g <= possible or (g == SEVERAL and self.sources[task])}
            for task, heads in self.heads.items()
        }

    # As a compensation ----------------------------------------------------------------------------------------

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Tell whether there is a head of the task for the model without these tasks."""
        return self._head_without(task, gone) is not None

    def _head_without(self, task: int, gone: Collection[int]) -> FittedHead | None:
        lost, heads = self.sources.get(task, frozenset()) & frozenset(gone), self.heads.get(task, {})
        return heads.get(lost, heads.get(SEVERAL) if lost else None)

    @torch.no_grad()
    def compensate(
        self, model: TaskMaskedModel, gone: Collection[int], removal: Removal, change: Transaction
    ) -> list[str]:
        """Swap in the heads for the model without these tasks, and keep only those for it without more of them."""
        change.keep(self, "heads", "sources")
        lost = frozenset(gone)
        swapped, with_norms = [], False
        kept: dict[int, dict[frozenset[int], FittedHead]] = {}
        for task, heads in self.heads.items():
            if task in lost:
                continue
            here, head = self.sources[task] & lost, self._head_without(task, lost)
            if head is not None:
                self._swap(model, task, head, change)
                swapped.append(task)
                with_norms |= bool(head.statistics)
            # A head that was fitted while one of the lost tasks was there would bring some of it back. The others are
            # for larger sets, which from now on are named by those of their tasks that are still there.
            kept[task] = {removed - here: head for removed, head in heads.items() if here < removed}
            if SEVERAL in heads and self.sources[task] - here:
                kept[task][SEVERAL] = heads[SEVERAL]
        self.heads = kept
        self.sources = {task: sources - lost for task, sources in self.sources.items() if task not in lost}
        if not swapped:
            return []
        what = "heads and norms' statistics" if with_norms else "heads"
        return [f"{what} of tasks {swapped} replaced by those fitted for the model without tasks {sorted(lost)}"]


def _plain(heads: Mapping[frozenset[int], FittedHead]) -> dict[frozenset[int], dict[str, Any]]:
    return {gone: dict(vars(head)) for gone, head in heads.items()}


def _reads(use: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> bool:
    return any(name in use and bool((use[name].cpu() & where).any()) for name, where in moved.items())


def _sets(sources: Collection[int], most: int) -> list[frozenset[int]]:
    """Sets of tasks that get a head: all of them, or of more tasks than ``most`` single ones, and several in common."""
    few = len(sources) <= most
    sizes = range(1, 1 + (len(sources) if few else 1))
    sets = [frozenset(some) for size in sizes for some in combinations(sorted(sources), size)]
    return sets if few else [*sets, SEVERAL]


def _some_sets(sources: Collection[int], seed: int) -> list[frozenset[int]]:
    """Different sets of several tasks, twice as many as there are tasks; small ones are as likely as large ones."""
    draw, found = random.Random(seed), dict[frozenset[int], None]()
    while len(found) < 2 * len(sources):
        found[frozenset(draw.sample(sorted(sources), draw.randint(2, len(sources))))] = None
    return list(found)


class SharedHeadCounterfactualPlugin(CounterfactualPlugin):
    """Fits the columns of the shared head that a task would own without some earlier tasks.

    A column belongs to the first of the remaining tasks that open its unit; later ones read it and never change it
    (under ``space="update"``). Without some tasks, what these wrote is at its initial values, and a column
    of theirs belongs to the next task that reads it. Each task's columns are fitted when it ends, beside those of
    earlier tasks as they would be then, and as a small change, since later tasks read them too. An unlearning
    puts them in, and records that as a repair made with the task's data, in the place of the one before it: a task that
    is unlearned later takes its refitted columns with it. A column that another remaining task has written is left
    alone. Up to five earlier tasks, every set of them has columns of its own.

    Needs a :class:`TrajectoryPlugin` in front of it that merges no permanent tasks: who wrote a column must be known.

    Args:
        options: those of :class:`CounterfactualPlugin`.

    Raises:
        TypeError: before a training, if the model has no shared head.
        ValueError: before a training, without such a :class:`TrajectoryPlugin`.
    """

    most_apart = 5

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._store = Trajectory()
        self._masking: TaskMaskPlugin | None = None

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Check the model and the trajectory, before anything of the task is made."""
        model, recorder = strategy.model, find_plugin(strategy, TrajectoryPlugin)
        if not isinstance(model, MaskedModel) or model.shared_head is None:
            raise TypeError(
                f"{type(self).__name__} refits a shared head, which this {type(model).__name__} does not have: use "
                "MaskedModel(backbone, shared_head=classes), or CounterfactualPlugin()"
            )
        if recorder is None or recorder.merge_permanent:
            raise ValueError(
                f"{type(self).__name__} must know who wrote a column of the head, and records what it refits: put a "
                "TrajectoryPlugin() in front of it, without merge_permanent=True"
            )
        self.after_loading(strategy)

    def after_loading(self, strategy: Strategy) -> None:
        """Find the plugins beside it, whose trajectory an unlearning writes to."""
        recorder = find_plugin(strategy, TrajectoryPlugin)
        self._store = self._store if recorder is None else recorder.trajectory
        self._masking = find_plugin(strategy, TaskMaskPlugin)

    def _head_without(self, task: int, gone: Collection[int]) -> FittedHead | None:
        head = super()._head_without(task, gone)
        if head is None:
            return None
        assert head.columns is not None
        mine = head.columns.clone()
        for other in set(self._store.logs) - set(self._store.writers([task, *gone])):
            if _WEIGHT in (moved := self._store.moved(other)):
                mine &= ~moved[_WEIGHT].any(0).to(mine.device)
        if not bool(mine.any()):
            return None
        return replace(head, weight=head.weight[:, mine[head.columns]], columns=mine)

    def _moved(self, trajectory: Trajectory, task: int) -> Mapping[str, Tensor]:
        return self._store.moved_with([task])

    @contextmanager
    def _as_if_unlearned(self, without: _WithoutTasks, gone: Collection[int]) -> Iterator[None]:
        with super()._as_if_unlearned(without, gone), Transaction() as change:
            for task in [task for task in self.heads if task not in gone]:
                head = self._head_without(task, gone)
                if head is not None:
                    for tensor, value in head.places(without.model, task):
                        change.write(tensor, value)
            yield

    def _kept(self, head: FittedHead) -> FittedHead:
        return head  # what the model holds must be what is recorded, and later tasks read it

    def _swap(self, model: TaskMaskedModel, task: int, fitted: FittedHead, change: Transaction) -> None:
        weight = model.backbone.get_parameter(_NAME)
        before = self._unrepaired(model, task, change)
        super()._swap(model, task, fitted, change)
        self._store.record_repair({_WEIGHT: before}, {_WEIGHT: weight}, [task])
        snapshot = None if self._masking is None else self._masking.snapshot
        if snapshot is not None:  # another task is in training: what it does not own returns to this when it ends
            snapshot.values[_WEIGHT] = snapshot.values[_WEIGHT].clone()
            snapshot.values[_WEIGHT][:, fitted.columns] = fitted.weight

    def _unrepaired(self, model: TaskMaskedModel, task: int, change: Transaction) -> Tensor:
        """Head without the task's columns of an earlier unlearning: a task that goes now had a part in their fit."""
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        outdated = [number for number in self._store.writers([task]) if number != task]
        if not outdated:
            return parameters[_WEIGHT].clone()
        removal = self._store.remove(outdated, parameters)
        change.call(self._store.restore, self._store.logs)
        self._store.apply(removal)
        return removal.values.get(_WEIGHT, parameters[_WEIGHT]).clone()
