"""Claims: whether the state after an unlearning is exactly that of a model that never saw the tasks.

``exact`` means equal bit for bit to the same run without the tasks that go. That follows by construction where

1. every training was a function of (seed, task) and of what it could see: seeded, masked, with a fresh optimizer, with
   nothing beside it that remembers (a plugin, the criterion, the optimizer itself), and at the same settings as the
   first one;
2. no remaining task's training could see a task that goes, or one that went before;
3. taking the tasks out leaves nothing of them: no entry that others read, no tensor that all tasks share;
4. the model is what the last training or unlearning here left: nobody else wrote into it.

Whatever does not hold is a reason, in words; an unlearning with a reason is ``approximate``. Nothing else decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from torch import nn

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.ledger import RequestError, TaskLedger
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.object_walk import memory_of
from avalanche_amnesia.saving.classes import saveable
from avalanche_amnesia.trajectory.removal import Removal
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.compensation import Compensation
from avalanche_amnesia.unlearning.inert import is_inert
from avalanche_amnesia.unlearning.purging.learned_state import cleaned_anyway

_OF_THE_HOST = (EvaluationPlugin, PeriodicEval, Clock)
"""Avalanche's plugins that count and report, and take no part in a training."""


class TamperedError(RequestError):
    """The model's tensors were changed by something else than trainings and unlearnings; nothing was unlearned."""


@saveable
@dataclass(frozen=True)
class Circumstances:
    """All that a training depends on beside seed, task and what it could see.

    Attributes:
        settings: of the optimizer, the length of the training, and the plugins; as comparable values.
        criterion: numbers and tensors that the criterion held.
        faults: reasons why the training can't be repeated from (seed, task).
    """

    settings: tuple[object, ...]
    criterion: tuple[tuple[str, str], ...]
    faults: tuple[str, ...]


@dataclass
class Claims:
    """Record of what each training could see, under which circumstances, and what follows for an unlearning.

    Attributes:
        influences: the tasks that can leave a trace in the task in training; empty between tasks.
        tainted: remaining tasks whose training saw a task that was unlearned later.
        changed: names of tensors that something else had written into when a later training began.
    """

    influences: frozenset[int] = frozenset()
    tainted: frozenset[int] = frozenset()
    _trainings: dict[int, Circumstances] = field(default_factory=dict)
    _first: Circumstances | None = None
    _criterion: tuple[tuple[str, str], ...] | None = None
    _optimizer: tuple[tuple[str, str], ...] | None = None
    _hashes: Mapping[str, str] | None = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    # A training -----------------------------------------------------------------------------------------------

    def look_before_training(self, model: nn.Module) -> None:
        """Note what something else has written into the model since; before any plugin prepares a training."""
        self.changed = self.tampered(state_hashes(model.state_dict()))

    def begin(self, strategy: Any, ledger: TaskLedger) -> None:
        """Note the tasks that a training which begins can see, and what its criterion and optimizer hold."""
        if self._criterion is None:
            self._criterion, self._optimizer = _criterion_memory(strategy), _optimizer_memory(strategy)
        self.influences = _seen_by_training(strategy, ledger)

    def first_step(self, strategy: Any, task: int) -> None:
        """Note the circumstances of a training, which every plugin has set up by its first step."""
        faults = _faults(strategy)
        if self._optimizer_remembers(strategy):
            faults.append(f"{type(strategy.optimizer).__name__} keeps state of its own, which no new task resets")
        self._trainings[task] = Circumstances(_settings(strategy), _criterion_memory(strategy), tuple(faults))
        self._first = self._trainings[task] if self._first is None else self._first

    def abandon(self, task: int | None, model: nn.Module, *, first: bool) -> None:
        """Drop a task that was given up.

        Args:
            task: its label; None: there is none.
            model: without it.
            first: whether no task was trained before it: the next one is the first.
        """
        self.influences = frozenset()
        if task is not None:
            self._trainings.pop(task, None)
        self._first = None if first else self._first
        if self._hashes is None:  # tasks were unlearned in the middle of it, which stays
            self._hashes = state_hashes(model.state_dict())

    def end(self, task: int, model: nn.Module, forgotten: Collection[int]) -> None:
        """Enter a task whose training is over, and the state in which it left the model.

        Args:
            task: its label.
            model: as the training left it.
            forgotten: the tasks that were unlearned in the middle of it.
        """
        if self.influences & {*self.tainted, *forgotten}:
            self.tainted |= {task}  # it learned from tasks that are not what the reference has
        self.influences = frozenset()
        self._hashes = state_hashes(model.state_dict())

    def unlearned(
        self, tainted: Collection[int], hashes: Mapping[str, str], in_training: int | None, change: Transaction
    ) -> None:
        """Enter an unlearning.

        Args:
            tainted: remaining tasks that were trained beside a task that is gone by now.
            hashes: of the model's tensors afterwards.
            in_training: the task in training: how it leaves the model is noted when it ends, or is given up; None
                between tasks.
            change: receives every change.
        """
        change.set(self, tainted=frozenset(tainted), _hashes=dict(hashes) if in_training is None else None)

    # The answer -----------------------------------------------------------------------------------------------

    def tampered(self, hashes: Mapping[str, str]) -> frozenset[str]:
        """Names of tensors that are not as the last training or unlearning left them.

        Args:
            hashes: of the model's tensors, between tasks.
        """
        left = self._hashes or {}
        return self.changed | {name for name, digest in left.items() if hashes.get(name) != digest}

    def tainted_without(self, tasks: Collection[int], ledger: TaskLedger) -> frozenset[int]:
        """Remaining tasks that were trained beside one of these tasks, or one that went before."""
        remaining = (task for task in ledger.remaining if task not in tasks)
        return frozenset(task for task in remaining if task in self.tainted or ledger.saw(task) & set(tasks))

    def reasons(
        self,
        tasks: Sequence[int],
        strategy: Any,
        ledger: TaskLedger,
        removal: Removal,
        *,
        in_training: int | None,
        unrecorded: Collection[int],
        shared_state: Collection[str],
        tampered: Collection[str],
    ) -> tuple[str, ...]:
        """Reasons why the state afterwards may differ from a run that never saw the tasks; none: it is exact.

        Args:
            tasks: that go.
            strategy: as it is, before they go.
            ledger: who remains.
            removal: what taking them out leads to.
            in_training: the task in training; None between tasks.
            unrecorded: tasks that the model came with.
            shared_state: tensors beside the parameters that all tasks share.
            tampered: tensors that something else wrote into.
        """
        gone = set(tasks)
        remaining = [task for task in ledger.remaining if task not in gone]
        found = [*_faults(strategy)]
        if self._optimizer_remembers(strategy):
            found.append(f"{type(strategy.optimizer).__name__} keeps state of its own, which no new task resets")
        involved = [*remaining, *([] if in_training is None else [in_training])]
        trained = {task: self._trainings[task] for task in involved if task in self._trainings}
        found += [fault for circumstances in trained.values() for fault in circumstances.faults]
        found += self._unlike(trained, strategy)
        for task in remaining:
            beside = sorted(ledger.saw(task) & gone)
            if beside:
                found.append(f"task {task} was trained beside {_listed(beside)}")
            elif task in self.tainted:
                found.append(f"task {task} was trained beside a task that was unlearned before")
        if in_training is not None and self.influences & gone:
            seen = _listed(sorted(self.influences & gone))
            found.append(f"task {in_training}, which is in training, could see {seen}")
        if removal.shared:
            found.append(f"entries of {len(removal.shared)} tensors stay, because remaining tasks read them")
        if shared_state:
            found.append(f"tensors {sorted(shared_state)} beside the parameters are shared by all tasks")
        if unrecorded:
            found.append(f"{_listed(sorted(unrecorded))} came with the model, and nothing is recorded of them")
        if tampered:
            found.append(
                f"tensors {sorted(tampered)} were changed by something else than trainings and unlearnings here"
            )
        return tuple(dict.fromkeys(found))

    def criterion_learned(self, strategy: Any) -> bool:
        """Tell whether the criterion holds anything else by now than before the first training."""
        return self._criterion is not None and _criterion_memory(strategy) != self._criterion

    def _optimizer_remembers(self, strategy: Any) -> bool:
        return self._optimizer is not None and _optimizer_memory(strategy) != self._optimizer

    def _unlike(self, trained: Mapping[int, Circumstances], strategy: Any) -> list[str]:
        """Trainings at other settings than the first one, and a host that is not what it was."""
        if self._first is None:
            return []
        first, found = self._first, []
        other = [task for task, here in trained.items() if here.settings != first.settings]
        if other:
            found.append(f"{_listed(other)} trained at other settings than the first task, or beside other plugins")
        remembering = [task for task, here in trained.items() if here.criterion != first.criterion]
        if remembering:
            found.append(f"the criterion was no longer as at the first task when {_listed(remembering)} began")
        if _plugins(strategy) != first.settings[-1]:
            found.append("the strategy has other plugins by now than when the first task was trained")
        return found


def _listed(tasks: Sequence[int]) -> str:
    return f"task {tasks[0]}" if len(tasks) == 1 else f"tasks {list(tasks)}"


# Tasks and state that a training can see ---------------------------------------------------------------------------


def isolates(model: Any) -> bool:
    """Tell whether a model lets no training read or write what belongs to a task that may be unlearned."""
    return isinstance(model, MultiHeadModel) and model.isolates


def _seen_by_training(strategy: Any, ledger: TaskLedger) -> frozenset[int]:
    """The remaining tasks that can leave a trace in the task in training, directly or by way of another one."""
    remaining = frozenset(ledger.remaining)
    if isolates(strategy.model):
        return frozenset()
    masking = next((p for p in strategy.plugins if getattr(p, "commits_to_mask", False)), None)
    if masking is None or masking.influences is None:
        return remaining
    seen: frozenset[int] = masking.influences
    return seen.union(*(ledger.saw(task) for task in seen & remaining)) & remaining


def _faults(strategy: Any) -> list[str]:
    """Reasons why a training here is no function of (seed, task) and of what it can see.

    A plugin says of itself, by class attributes, that its part is such a function (``repeatable``), that it seeds every
    task (``seeds_tasks``), that it commits a task to its mask (``commits_to_mask``). Of other people's plugins those
    that hold nothing and write nothing cost no ``exact``.
    """
    found = []
    if not any(getattr(plugin, "seeds_tasks", False) for plugin in strategy.plugins):
        found.append("no SeedingPlugin makes every draw derive from the seed and the task")
    if not isolates(strategy.model) and not any(getattr(p, "commits_to_mask", False) for p in strategy.plugins):
        found.append("without masks every task builds on what the others wrote")
    if not getattr(strategy, "optimizer_always_fresh", False):
        found.append("the optimizer's state outlived a task")
    for plugin in strategy.plugins:
        known = getattr(plugin, "repeatable", False) or isinstance(plugin, (*_OF_THE_HOST, Compensation))
        if not known and not is_inert(plugin):
            found.append(f"plugin {type(plugin).__name__} may keep state")
    return found


def _settings(strategy: Any) -> tuple[object, ...]:
    """Settings of the optimizer, the length of a training, and the plugins, which come last."""
    groups = tuple(
        tuple((name, repr(value)) for name, value in sorted(group.items()) if name != "params")
        for group in strategy.optimizer.param_groups
    )
    return type(strategy.optimizer).__name__, groups, strategy.train_mb_size, strategy.train_epochs, _plugins(strategy)


def _plugins(strategy: Any) -> tuple[str, ...]:
    kinds = (type(plugin) for plugin in strategy.plugins if not isinstance(plugin, _OF_THE_HOST))
    return tuple(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))


def _criterion_memory(strategy: Any) -> tuple[tuple[str, str], ...]:
    beside = [strategy, strategy.optimizer, strategy.evaluator, *strategy.plugins, *cleaned_anyway(strategy.model)]
    return memory_of(strategy._criterion, "criterion", beside)


_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})


def _optimizer_memory(strategy: Any) -> tuple[tuple[str, str], ...]:
    """Numbers and tensors that an optimizer keeps beside its state, which a new task does not reset."""
    optimizer = strategy.optimizer
    if type(optimizer).__module__.startswith("torch.optim"):
        return ()
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_EVERY_OPTIMIZER}
    return memory_of(own, "optimizer", [strategy, *cleaned_anyway(strategy.model)])
