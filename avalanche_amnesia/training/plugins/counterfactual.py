"""Replacement heads, fitted in advance for the model without some tasks (``compensation="counterfactual"``)."""

import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.saving.encoding import OwnFile
from avalanche_amnesia.saving.values import checked, create
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training import head_fit
from avalanche_amnesia.training.head_fit import CounterfactualFeatures, fitted_head
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.norm_statistics import STATISTICS_BATCHES, running_norms
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.task_faults import drawn_positions, samples_at, training_samples
from avalanche_amnesia.trajectory.removal import ChangedEntries, Removal
from avalanche_amnesia.trajectory.sparse import put, take
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.trajectory.undo_log import UndoLog
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import FitError

SEVERAL = frozenset({-1})
"""Key of the head for any set of several tasks."""
MOST_SEPARATE = 3
"""Largest number of tasks whose sets all get separate heads."""


class _WithoutTasks:
    """Helper that removes the updates of chosen tasks from a model's backbone within a ``with`` block."""

    def __init__(self, model: TaskMaskedModel, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._parameters = {name: p.detach() for name, p in model.backbone.named_parameters(prefix="backbone")}
        self._writers = None if trajectory.repairs else _writers(trajectory.logs, self._parameters)

    @contextmanager
    def remove_temporarily(self, removed: Collection[int]) -> Iterator[None]:
        """Remove updates (weight changes) of the tasks ``removed`` from the backbone; restore them after the block."""
        moved = [(self._parameters[name], of) for name, of in self._changed_entries(removed).items()]
        try:
            for parameter, of in moved:
                of.remove_from(parameter)
            yield
        finally:
            for parameter, of in moved:
                of.restore_in(parameter)

    def _changed_entries(self, removed: Collection[int]) -> Mapping[str, ChangedEntries]:
        if self._writers is None:  # computed and not applied: the logs do not change
            return self._trajectory.remove(tuple(removed), self._parameters).changed
        is_gone = torch.tensor([False, *(writer in removed for writer in self._trajectory.logs)])
        found = {}
        for name, (writer_of, old) in self._writers.items():
            where, now = take(is_gone, writer_of).reshape(old.shape), self._parameters[name]
            found[name] = ChangedEntries(
                where.to(now.device), *(take(of, where.to(of.device).reshape(-1)) for of in (now, old))
            )
        return found


def _writers(logs: Mapping[int, UndoLog], current: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Return each entry's writer (log number from 1; 0: none) and old value, by tensor; None if one has two writers."""
    found = {}
    for name, value in current.items():
        writer_of, old = torch.zeros(value.numel(), dtype=torch.int16), value.cpu().clone()
        for number, log in enumerate(logs.values(), 1):
            if name in log:
                where = log[name].where.reshape(-1)
                if bool(take(writer_of, where).any()):
                    return None
                put(writer_of, where, torch.tensor(number, dtype=torch.int16))
                put(old, where, log[name].old_values(take(old, where)))
        found[name] = writer_of, old.to(value.device)
    return found


class CounterfactualPlugin(Plugin):
    """Plugin that fits replacement heads when a task ends, one per set of earlier tasks that may be unlearned later.

    While the task's data is available, the updates of an earlier task are removed from the backbone for a forward pass,
    the head is fitted to the remaining features, and the backbone is restored bit for bit. An unlearning then only
    swaps heads: no data is stored, and training steps take no longer. Only earlier tasks whose updates overlap
    the task's mask are considered. A head is dropped if its set can't be unlearned any more (a task became permanent),
    or if the head was fitted to a model with a task that a request has unlearned since.

    Of up to three considered tasks, every set gets its own head. Of more, every single task gets a head, and all larger
    sets share one. The shared head is fitted to samples in parts, each passed through the backbone without a different
    such set, so tasks that are unlearned later may still influence it.

    Weight changes by a :class:`RepairPlugin` are removed for all fits too, because the next unlearning removes them. A
    task that uses weights with such changes also gets a head for the case that only these changes are removed. If the
    features overflow, so that a head can't be fitted, a warning is emitted and the head is left out.

    Needs :class:`TrajectoryPlugin`, :class:`UnlearningPlugin` and a masked model.

    Args:
        samples: largest number of the task's training samples to use, at least 1; fewer are used if they need more
            than 2 GiB of memory.
        seed: the choice of the samples derives from it and the task.

    Attributes:
        heads: task → set of unlearned earlier tasks, or ``SEVERAL``, → :class:`FittedHead`.
        sources: task → earlier tasks whose weights its mask uses, and that could still be unlearned at its training.

    Raises:
        ValueError: for an invalid value; before a training, without a :class:`TrajectoryPlugin`.
        TypeError: before a training, if the model has no masks.
    """

    def __init__(self, *, samples: int = head_fit.MOST_SAMPLES, seed: int = 0) -> None:
        super().__init__()
        self.samples, self.seed = checks.whole_number("samples", samples), checks.whole_number("seed", seed, None)
        self.heads: dict[int, dict[frozenset[int], FittedHead]] = {}
        self.sources: dict[int, frozenset[int]] = {}

    def state(self) -> dict[str, Any]:
        """Return :attr:`heads` and :attr:`sources` as a state to save."""
        heads = {task: OwnFile({g: dict(vars(head)) for g, head in of.items()}) for task, of in self.heads.items()}
        return {"heads": heads, "sources": self.sources}

    def load_state(self, state: Any) -> None:
        """Restore a state that :meth:`state` returned."""
        kinds = {"heads": dict[int, dict[frozenset[int], dict]], "sources": dict[int, frozenset[int]]}
        heads, sources = checked(state, **kinds)
        made_heads = {task: {key: create(FittedHead, head) for key, head in of.items()} for task, of in heads.items()}
        self.heads, self.sources = made_heads, sources

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: raise an error if the model has no masks, or no TrajectoryPlugin exists."""
        if not isinstance(strategy.model, TaskMaskedModel):
            raise TypeError(
                f"counterfactual heads need a model with masks, got {type(strategy.model).__name__}: where later tasks "
                "change what a task reads, a head that was fitted in advance no longer fits"
            )
        if find_plugin(strategy, TrajectoryPlugin) is None:
            raise ValueError(
                f"{type(self).__name__}() also needs TrajectoryPlugin() and UnlearningPlugin(), which record what "
                "tasks change: AmnesiacHAT(compensation='counterfactual')"
            )

    @torch.no_grad()
    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Fit replacement heads for a task that has just been trained, to swap in if earlier tasks are unlearned."""
        possible = frozenset(unlearnable)
        self.sources = {task: sources & possible for task, sources in self.sources.items()}
        self.heads = {
            task: {g: head for g, head in heads.items() if g <= possible or (g == SEVERAL and self.sources[task])}
            for task, heads in self.heads.items()
        }
        model, recorder = strategy.model, find_plugin(strategy, TrajectoryPlugin)
        assert recorder is not None
        trajectory = recorder.trajectory
        # If entries read by remaining tasks stay (WSN), unlearning an earlier task removes nothing from this one.
        sources = frozenset(
            earlier
            for earlier in unlearnable
            if earlier != task and not model.keeps_shared_entries and model.users_of(trajectory.moved(earlier), [task])
        )
        self.sources[task], self.heads[task] = sources, {}
        removals = _removal_sets(sources)
        if model.users_of(trajectory.moved_with(()), [task]):
            removals.append(frozenset())  # the next request removes the repair
        if not removals:
            return
        seed, masking = derive_seed(self.seed, "counterfactual", task), find_plugin(strategy, TaskMaskPlugin)
        unsure = None if masking is None else masking.unsure
        if unsure is None or len(unsure) > self.samples:
            unsure = drawn_positions(strategy, self.samples, seed)
        x, y = samples_at(strategy, unsure)
        seen = []
        if running_norms(model.task_parts(task)):
            drawn, _ = training_samples(strategy, STATISTICS_BATCHES * strategy.train_mb_size, seed)
            seen = [some for some in drawn.split(strategy.train_mb_size) if len(some) > 1]
        without = _WithoutTasks(model, trajectory)
        features_now = CounterfactualFeatures(model, task, x, seen)
        labels, unfitted = y.to(features_now.x.device), list[str]()
        with evaluation_mode(model):
            for lost in removals:
                try:
                    self.heads[task][lost] = head_fit.compact_head(self._fit_head(without, features_now, labels, lost))
                except FitError as error:  # only this head is lost, not the trained task
                    unfitted.append(f"without {'several' if lost == SEVERAL else sorted(lost)}: {error}")
        if unfitted:
            warnings.warn(
                f"task {task} has no head for {len(unfitted)} of {len(removals)} sets of tasks that may be "
                f"unlearned ({'; '.join(unfitted)}). Unlearning such a set leaves it the head that it has, and the "
                "record names it as affected",
                stacklevel=2,
            )

    def _fit_head(
        self, without: _WithoutTasks, features_now: CounterfactualFeatures, labels: Tensor, removed: frozenset[int]
    ) -> FittedHead:
        """Return a head fitted to features of the network without the updates of the tasks in ``removed``."""
        task = features_now.task
        passes = [(head_fit.ALL, removed)]
        if removed == SEVERAL:
            sets = _draw_removal_sets(self.sources[task], derive_seed(self.seed, "several", task))[: len(labels)]
            passes = [(slice(number, None, len(sets)), lost) for number, lost in enumerate(sets)]
        for part, lost in passes:
            with without.remove_temporarily(lost):
                statistics = features_now(part)
        return replace(fitted_head(features_now.model, task, features_now.features, labels), statistics=statistics)

    # As a compensation ----------------------------------------------------------------------------------------

    def covers(self, task: int, removed: Collection[int]) -> bool:
        """Return True if ``task`` has a fitted head for the model without the tasks in ``removed``."""
        return self._head_without(task, removed) is not None

    def _head_without(self, task: int, removed: Collection[int]) -> FittedHead | None:
        lost, heads = self.sources.get(task, frozenset()) & frozenset(removed), self.heads.get(task, {})
        return heads.get(lost, heads.get(SEVERAL) if lost else None)

    @torch.no_grad()
    def compensate(
        self, model: TaskMaskedModel, tasks: Sequence[int], removal: Removal, change: Transaction
    ) -> list[str]:
        """Swap in the heads fitted without the unlearned ``tasks``; drop stored heads that these tasks influenced."""
        change.keep(self, "heads", "sources")
        lost = frozenset(tasks)
        swapped, with_norms = [], False
        kept: dict[int, dict[frozenset[int], FittedHead]] = {}
        for task, heads in self.heads.items():
            if task in lost:
                continue
            here, head = self.sources[task] & lost, self._head_without(task, lost)
            if head is not None:
                for tensor, value in head.replacements(model, task):
                    change.write(tensor, value)
                swapped.append(task)
                with_norms |= bool(head.statistics)
            # A head fitted while an unlearned task was in the model would restore traces of it. Heads for larger sets
            # stay, under the tasks of their set that remain.
            kept[task] = {removed - here: head for removed, head in heads.items() if here < removed}
            if SEVERAL in heads and self.sources[task] - here:
                kept[task][SEVERAL] = heads[SEVERAL]
        self.heads = kept
        self.sources = {task: sources - lost for task, sources in self.sources.items() if task not in lost}
        if not swapped:
            return []
        what = "heads and norms' statistics" if with_norms else "heads"
        return [f"{what} of tasks {swapped} replaced by those fitted for the model without tasks {sorted(lost)}"]


def _removal_sets(sources: Collection[int]) -> list[frozenset[int]]:
    """Return the sets of removed tasks to fit heads for: every subset; of over 3 tasks, each one and ``SEVERAL``."""
    few = len(sources) <= MOST_SEPARATE
    sizes = range(1, 1 + (len(sources) if few else 1))
    sets = [frozenset(some) for size in sizes for some in combinations(sorted(sources), size)]
    return sets if few else [*sets, SEVERAL]


def _draw_removal_sets(sources: Collection[int], seed: int) -> list[frozenset[int]]:
    """Draw ``2 * len(sources)`` different subsets of two or more tasks; each draw chooses the size uniformly."""
    draw, found = random.Random(seed), dict[frozenset[int], None]()
    while len(found) < 2 * len(sources):
        found[frozenset(draw.sample(sorted(sources), draw.randint(2, len(sources))))] = None
    return list(found)
