"""Heads precomputed for each set of earlier tasks that may be unlearned (``compensation="counterfactual"``)."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.saving.encoding import Apart, checked, made
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.head_fit import MOST_SAMPLES, CounterfactualFeatures, compacted, fitted_head
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.task_faults import training_samples
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.trajectory.sparse import fill
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import FitError

_NAME = "_shared_head.weight"
_WEIGHT = f"backbone.{_NAME}"


class CounterfactualPlugin(SupervisedPlugin):
    """Fits, when a task ends, its head for every set of earlier tasks that may be unlearned.

    While the task's data is still at hand, the updates of those earlier tasks are taken out of the backbone for one
    forward pass, the head is fitted to the features that are left, and the backbone is put back bit for bit. An
    unlearning then only swaps heads: no data is kept, and a training step costs nothing. Only tasks whose updates
    the task's mask reads count; heads for a set that can't go any more (a task of it became permanent) are dropped, and
    so are heads that were fitted in the presence of a task that was unlearned without them.

    All heads are for a backbone without repairs: a repair goes with the next request (:class:`RepairPlugin`). A task
    that reads what one changed gets a head for the empty set too: nothing else of what it reads may go. A head that
    can't be fitted, because the features that are left overflow, is left out with a warning.

    Needs :class:`TrajectoryPlugin` and :class:`UnlearningPlugin` beside it and a masked model.

    Args:
        max_sets: sets of tasks per task, at least 1: single tasks first, then pairs, and so on; among equals the newest
            tasks first. 31 are all sets of five tasks. Each costs one forward pass over ``samples``, and one head.
        samples: at most so many of the task's training samples are used, at least 1; fewer where these would take more
            than 2 GiB of memory.
        seed: their choice derives from it and the task.

    Attributes:
        heads: task → set of earlier tasks that are gone → :class:`FittedHead`.
        sources: task → earlier tasks whose updates it reads, and that could be unlearned when it was trained.

    Raises:
        ValueError: for a value that is not allowed; before a training, without a :class:`TrajectoryPlugin`.
        TypeError: before a training, if the model has no masks.
    """

    def __init__(self, *, max_sets: int = 31, samples: int = MOST_SAMPLES, seed: int = 0) -> None:
        super().__init__()
        self.max_sets, self.samples = checks.whole_number("max_sets", max_sets), checks.whole_number("samples", samples)
        self.seed = checks.whole_number("seed", seed, None)
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
        removals = [*_possible_removals(sources, trajectory.tasks, self.max_sets)]
        if _reads(use, trajectory.moved_with(())):
            removals = [frozenset(), *removals]  # whatever is requested next, the repair goes with it
        if not removals:
            return
        x, y = training_samples(strategy, self.samples, derive_seed(self.seed, "counterfactual", task))
        features_now = CounterfactualFeatures(model, task, x, strategy.train_mb_size)
        unfitted: dict[frozenset[int], str] = {}
        for gone in removals:
            with self._as_if_unlearned(model, trajectory, gone):
                features, statistics = features_now()
                try:
                    head = fitted_head(model, task, features, y.to(features.device), gone)
                except FitError as error:  # costs this head, and not the task that was trained
                    unfitted[gone], head = str(error), None
            if head is not None:
                self.heads[task][gone] = replace(self._kept(head), statistics=statistics)
        if unfitted:
            reasons = "; ".join(f"without {sorted(gone)}: {reason}" for gone, reason in unfitted.items())
            warnings.warn(
                f"task {task} has no head for {len(unfitted)} of {len(removals)} sets of tasks that may be "
                f"unlearned ({reasons}). Unlearning such a set leaves it the head that it has, and the record names it "
                "as affected",
                stacklevel=2,
            )

    @contextmanager
    def _as_if_unlearned(self, model: TaskMaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Iterator[None]:
        """The model as if some tasks had been unlearned, for the length of a block; then as it was, bit for bit."""
        parameters = dict(model.backbone.named_parameters(prefix="backbone"))
        # Worked out and not applied: the logs stay as they are, and nothing but the backbone's values has to go back.
        removal = trajectory.remove(tuple(gone), {name: p.detach() for name, p in parameters.items()})
        try:
            for name, moved in removal.moved.items():
                fill(parameters[name], moved.where, moved.without)
            yield
        finally:
            for name, moved in removal.moved.items():
                fill(parameters[name], moved.where, moved.now)

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
            task: {gone: head for gone, head in heads.items() if gone <= possible} for task, heads in self.heads.items()
        }

    # As a compensation ----------------------------------------------------------------------------------------

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Tell whether there is a head of the task for the model without these tasks."""
        lost = self.sources.get(task, frozenset()) & frozenset(gone)
        return lost in self.heads.get(task, {})

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
            here = self.sources[task] & lost
            if self.covers(task, lost):
                self._swap(model, task, heads[here], change)
                swapped.append(task)
                with_norms |= bool(heads[here].statistics)
            # A head that was fitted while one of the lost tasks was there would bring some of it back. The others are
            # for larger sets, which from now on are named by those of their tasks that are still there.
            kept[task] = {removed - here: head for removed, head in heads.items() if here < removed}
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


def _possible_removals(sources: Collection[int], order: Collection[int], limit: int) -> Iterator[frozenset[int]]:
    """Sets of tasks that may be unlearned together: small ones first, among equals those of the newest tasks."""
    newest_first = [task for task in reversed(tuple(order)) if task in sources]
    found = (frozenset(s) for size in range(1, len(newest_first) + 1) for s in combinations(newest_first, size))
    yield from (removal for removal, _ in zip(found, range(limit), strict=False))


class SharedHeadCounterfactualPlugin(CounterfactualPlugin):
    """Fits the columns of the shared head that a task would own without some earlier tasks, for every set of these.

    A column belongs to the first of the remaining tasks that open its unit; later ones read it and never change it
    (under ``space="update"``). Without some tasks, what these wrote is at its initial values, and a column
    of theirs belongs to the next task that reads it. Each task's columns are fitted when it ends, beside those of
    earlier tasks as they would be then, and as a small change, since later tasks read them too. An unlearning
    puts them in, and records that as a repair made with the task's data, in the place of the one before it: a task that
    is unlearned later takes its refitted columns with it. A column that several remaining tasks have written is left
    alone.

    Needs a :class:`TrajectoryPlugin` in front of it that merges no permanent tasks: who wrote a column must be known.

    Args:
        options: those of :class:`CounterfactualPlugin`.

    Raises:
        TypeError: before a training, if the model has no shared head.
        ValueError: before a training, without such a :class:`TrajectoryPlugin`.
    """

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

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """As the base class's, while nobody else who remains has written the task's columns."""
        return super().covers(task, gone) and self._owns(task, self.heads[task][self.sources[task] & set(gone)], gone)

    def _owns(self, task: int, head: FittedHead, gone: Collection[int]) -> bool:
        assert head.columns is not None
        columns = head.columns.cpu()
        others = set(self._store.logs) - set(self._store.writers([task, *gone]))
        moved = (self._store.moved(other).get(_WEIGHT) for other in others)
        return not any(where is not None and bool(where[:, columns].any()) for where in moved)

    def _moved(self, trajectory: Trajectory, task: int) -> Mapping[str, Tensor]:
        return self._store.moved_with([task])

    @contextmanager
    def _as_if_unlearned(self, model: TaskMaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Iterator[None]:
        with super()._as_if_unlearned(model, trajectory, gone), Transaction() as change:
            for task, heads in self.heads.items():
                lost = self.sources[task] & frozenset(gone)
                if task not in gone and lost in heads and self._owns(task, heads[lost], gone):
                    for tensor, value in heads[lost].places(model, task):
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
