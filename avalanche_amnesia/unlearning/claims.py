"""Claims: whether the model after an unlearning is exactly equal to a model never trained on the unlearned tasks.

``exact`` means: equal, bit for bit, to the same run without the unlearned tasks. This follows by construction if

1. every training was a function of (seed, task) and of its visible tasks: seeded, masked, with a fresh optimizer,
   without a plugin that keeps state, with settings and module attributes of the first training;
2. no remaining task's training could see an unlearned task, now or earlier;
3. the removal leaves nothing of the tasks: no entry that remaining tasks read, no tensor that all tasks share;
4. only trainings and unlearnings of this strategy wrote into the model.

Each violated condition is a reason, in words. An unlearning with a reason is ``approximate``. Without a reason it is
``exact``, or ``conditional`` if code outside of torch, Avalanche etc. took part (open parts, see ``assumptions.py``):
exact, if these parts depend on nothing but their inputs and the seeded random streams.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from blake3 import blake3
from torch import nn

from avalanche_amnesia.audit.record import Claim
from avalanche_amnesia.benchmarks.data import labels_fingerprint, single_task
from avalanche_amnesia.bits import model_hashes
from avalanche_amnesia.ledger import RequestError, TaskLedger
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.processes import n_processes
from avalanche_amnesia.saving.encoding import OwnFile
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, learning_settings
from avalanche_amnesia.saving.values import checked, create
from avalanche_amnesia.strategy import Strategy, autocast_now
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning import assumptions, texts
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.purging.purgers import purger_of

_PLAIN = (bool, int, float, str, type(None))
_OF_EVALUATION = ("eval_streams",)
"""Names of arguments of ``train`` that the result of a training does not depend on."""
TRAINED_DATA: set[str] = set()
"""Task and fingerprint of labels (as text) of each training in this process, or in a process that started it."""


class TamperedError(RequestError):
    """Error raised if tensors of the model were changed outside of trainings and unlearnings. Nothing was unlearned."""


@dataclass(frozen=True)
class Circumstances:
    """Settings, plugins and attributes at one task's training, which a retraining must repeat to give equal bits."""

    settings: dict[str, Any]  # of the strategy, its optimizer and plugins
    plugins: tuple[str, ...]  # class names of the strategy's plugins
    attributes: texts.Attributes  # of the network's modules and of the loss at the first step
    faults: tuple[str, ...]  # reasons why the training is no function of seed, task and visible tasks
    options: dict[str, Any]  # keyword arguments of ``strategy.train``; a tuple replaces a value that cannot be saved
    place: str  # text that identifies the weights of the task; empty if all tasks share them
    rests_on: tuple[str, ...]  # names of the parts outside of closed packages that took part


@dataclass
class Claims:
    """Log of trainings (settings, influencing tasks), to decide whether an unlearning is exact or only approximate.

    ``company``: data that user code may remember, the union of :data:`TRAINED_DATA` in all processes that trained.
    """

    influences: frozenset[int] = frozenset()
    tainted: frozenset[int] = frozenset()
    _trainings: dict[int, Circumstances] = field(default_factory=dict)
    _first: Circumstances | None = None
    _hashes: Mapping[str, str] | None = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    company: frozenset[str] = frozenset()

    def state(self) -> dict[str, Any]:
        """Return all fields, such as the log of trainings, as a dict to save."""
        trainings = {task: OwnFile(dict(vars(training))) for task, training in self._trainings.items()}
        first = None if self._first is None else dict(vars(self._first))
        return {**vars(self), "_trainings": trainings, "_first": first}

    def load_state(self, state: Any) -> None:
        """Restore the log of trainings from a state that :meth:`state` returned."""
        new = Claims(*checked(state, **get_type_hints(Claims) | {"_trainings": dict[int, dict], "_first": dict | None}))
        new._trainings = {task: create(Circumstances, held) for task, held in new._trainings.items()}
        new._first = None if new._first is None else create(Circumstances, new._first)
        vars(self).update(vars(new))

    def note_changed_tensors(self, model: nn.Module) -> None:
        """Before plugins prepare a training: store names of tensors changed since the last training or unlearning."""
        self.changed = self.tampered_tensors(model_hashes(model))

    def begin_training(self, strategy: Strategy, ledger: TaskLedger) -> dict[int, Circumstances]:
        """Record which tasks can influence this training; return the earlier log, to be restored on failure."""
        self.influences = _influencing_tasks(strategy, ledger)
        TRAINED_DATA.add(data_fingerprint(strategy.experience))
        self.company |= TRAINED_DATA
        return self._trainings

    def first_step(self, strategy: Strategy, task: int, options: dict[str, Any], earlier: Circumstances | None) -> None:
        """At a training's first step: log settings, plugins and user code; ``earlier``: log of an earlier part."""
        faults = tuple(self.faults(strategy))
        settings, plugins = _training_settings(strategy), _plugin_classes(strategy)
        place = next((plugin.place for plugin in strategy.plugins if getattr(plugin, "place", "")), "")
        kept = {name: value if type(value) in _PLAIN else (type(value).__name__,) for name, value in options.items()}
        attributes, rests_on = texts.attributes_of(strategy), assumptions.open_parts(strategy, options)
        new = Circumstances(settings, plugins, attributes, faults, kept, place, rests_on)
        if earlier is not None:  # another part of the task: a fault of any part is a fault of the task
            faults = (*earlier.faults, *faults, *self._differing_trainings({task: new}, strategy))
            new = replace(earlier, faults=faults, rests_on=tuple(dict.fromkeys((*earlier.rests_on, *rests_on))))
        self._trainings = {**self._trainings, task: new}
        self._first = self._trainings[task] if self._first is None else self._first

    def note_loaded_data(self, strategy: Strategy) -> None:
        """After loading a state: if a user's plugin was loaded too, record that the plugin may know earlier data."""
        users = [plugin for plugin in strategy.plugins if not texts.is_closed(type(plugin))]
        if any(hasattr(plugin, name) for plugin in users for name in ("load_state", "after_loading")):
            TRAINED_DATA.update(self.company)

    def restore_log(self, earlier: dict[int, Circumstances] | None, model: nn.Module, *, none_finished: bool) -> None:
        """Undo an aborted training: set the log of trainings back to ``earlier``, or keep it if that is None."""
        self.influences = frozenset()
        self._trainings = self._trainings if earlier is None else earlier
        self._first = None if none_finished else self._first
        if self._hashes is None:  # tasks were unlearned during this training, and stay unlearned
            self._hashes = model_hashes(model)

    def end_training(self, task: int, strategy: Strategy, forgotten: Collection[int]) -> None:
        """At a training's end: log changed attributes, model hashes, and whether ``forgotten`` tasks influenced it."""
        training = self._trainings.get(task)
        if training is not None:
            changed = texts.changed_attributes(training.attributes, texts.attributes_of(strategy))
            faults = (f"training task {task} changed {changed}",) if changed else ()
            rests_on = tuple(dict.fromkeys((*training.rests_on, *assumptions.open_parts(strategy, {}))))
            self._trainings[task] = replace(training, faults=(*training.faults, *faults), rests_on=rests_on)
        if self.influences & {*self.tainted, *forgotten}:
            self.tainted |= {task}  # it learned from tasks that differ from those of a reference, or are missing there
        self.influences = frozenset()
        self._hashes = model_hashes(strategy.model)

    def record_unlearning(self, context: UnlearningContext, hashes: Mapping[str, str], change: Transaction) -> None:
        """Record an unlearning: tasks that may contain traces of unlearned ones, and the model's new ``hashes``."""
        left = dict(hashes) if context.in_training is None else None
        change.set(self, tainted=self.tainted_after(context.tasks, context.ledger), _hashes=left)

    def training_of(self, task: int) -> Circumstances:
        """Return the :class:`Circumstances` (settings, plugins, …) of a task's last training."""
        return self._trainings[task]

    def check_processes(self) -> None:
        """Raise RequestError if the number of processes differs from that of the first training."""
        there = 1 if self._first is None else self._first.settings.get("processes", 1)
        if there != n_processes():
            raise RequestError(
                f"the tasks were trained on {there} processes together, and here are {n_processes()}, which give other "
                f"bits: prove it on as many, torchrun --nproc-per-node {there}"
            )

    def train_options(self) -> dict[str, Any]:
        """Return the first ``train`` call's keyword arguments; RequestError if one was no number, text or None."""
        options = {} if self._first is None else _learning_options(self._first)
        if lost := [name for name, value in options.items() if isinstance(value, tuple)]:
            raise RequestError(
                f"the tasks were trained with train({', '.join(lost)}=…), of which only the names are kept: give all "
                "arguments again, prove(…, train_options={…})"
            )
        return options

    def disprove(self, tasks: Collection[int], reason: str) -> None:
        """Record ``reason``: retraining ``tasks`` gave other weights, so unlearnings that keep one are not exact."""
        faults = {t: (*of.faults, reason) for t, of in self._trainings.items() if t in tasks}
        new = {task: replace(self._trainings[task], faults=found) for task, found in faults.items()}
        self._trainings = {**self._trainings, **new}

    def tampered_tensors(self, hashes: Mapping[str, str], *, in_training: bool = False) -> frozenset[str]:
        """Return the names of tensors that changed, appeared or vanished since the last training or unlearning."""
        left = {} if in_training or self._hashes is None else self._hashes
        names = {*left, *hashes} if left else ()
        return self.changed | {name for name in names if hashes.get(name) != left.get(name)}

    def tainted_after(self, tasks: Collection[int], ledger: TaskLedger) -> frozenset[int]:
        """Return the remaining tasks that may contain traces of unlearned tasks after ``tasks`` are unlearned."""
        remaining = (task for task in ledger.remaining if task not in tasks)
        return frozenset(task for task in remaining if task in self.tainted or ledger.saw(task) & set(tasks))

    def reasons(self, context: UnlearningContext, tampered: Collection[str]) -> tuple[str, ...]:
        """Return the reasons why the model may differ from a run without the unlearned tasks; empty if it is equal."""
        strategy, ledger, in_training = context.strategy, context.ledger, context.in_training
        gone, remaining = set(context.tasks), context.remaining
        found, trained = self.faults(strategy), self._trainings_involved(context)
        found += [fault for circumstances in trained.values() for fault in circumstances.faults]
        found += self._differing_trainings(trained, strategy)
        for task in remaining:
            if beside := sorted(ledger.saw(task) & gone):
                found.append(f"task {task} may have learned from {_as_text(beside)}")
            elif task in self.tainted:
                of = sorted(ledger.saw(task) & {*ledger.unlearned})
                found.append(f"task {task} may have learned from {_as_text(of) if of else 'a task'}, unlearned before")
        if in_training is not None and self.influences & gone:
            found.append(f"task {in_training}, in training, could see {_as_text(sorted(self.influences & gone))}")
        if context.removal.shared:
            found.append(f"entries of {len(context.removal.shared)} tensors remain, because remaining tasks use them")
        if context.shared_state:
            found.append(f"tensors {sorted(context.shared_state)}, no parameters, are shared by all tasks")
        if context.unrecorded:
            found.append(f"{_as_text(sorted(context.unrecorded))} came with the model, and nothing is recorded of them")
        if tampered:
            found.append(f"tensors {sorted(tampered)} were changed by something else than trainings and unlearnings")
        return tuple(dict.fromkeys(found))

    def _trainings_involved(self, context: UnlearningContext) -> dict[int, Circumstances]:
        """Return task → logged settings (:class:`Circumstances`), for the remaining tasks and the task in training."""
        in_training = [] if context.in_training is None else [context.in_training]
        return {task: self._trainings[task] for task in (*context.remaining, *in_training) if task in self._trainings}

    def claim_fields(self, context: UnlearningContext, reasons: tuple[str, ...]) -> dict[str, Any]:
        """Return a plan's ``claim`` (exact or not), ``reasons`` (why not) and ``rests_on`` (user code it trusts)."""
        involved = self._trainings_involved(context)
        named = (part for each in involved.values() for part in each.rests_on)
        others = {task: held for task, held in self._trainings.items() if task not in involved}
        # Code that changes settings between tasks may act differently if a task is missing.
        changes = (f"the code around train: {change}" for change in self._differing_trainings(others, context.strategy))
        parts = tuple(dict.fromkeys((*named, *changes)))
        claim: Claim = "approximate" if reasons else "conditional" if parts else "exact"
        return {"claim": claim, "reasons": reasons, "rests_on": parts if claim == "conditional" else ()}

    def fields_after_retraining(self, context: UnlearningContext, first: Circumstances) -> dict[str, Any]:
        """Return a plan's claim (exact or not) with its reasons, if a task is retrained without some of its samples.

        The fields are those of :meth:`claim_fields`; ``first``: the settings of the task's first training.
        """
        (task,), trained_again = context.tasks, copy(context)
        trained_again.tasks = ()  # the task remains from here on
        found = [*context.plan.reasons, *self.reasons(trained_again, ())]
        if self._trainings[task].place != first.place:
            found.append(f"task {task} has other weights, or reads other tasks, than at first")
        return self.claim_fields(trained_again, tuple(dict.fromkeys(found)))

    def assume(self, task: int, part: str, change: Transaction) -> None:
        """Add ``part``, e.g. "data of task 1 unchanged", to assumptions of exactness until ``task`` is retrained."""
        held = self._trainings[task]
        change.set(self, _trainings={**self._trainings, task: replace(held, rests_on=(*held.rests_on, part))})

    def has_criterion_changed(self, strategy: Strategy) -> bool:
        """Return True if the attributes of the criterion differ from those at the first training."""
        now = {path: value for path, value in texts.attributes_of(strategy).items() if path.startswith("criterion")}
        return self._first is not None and bool(texts.changed_attributes(self._first.attributes, now))

    def faults(self, strategy: Strategy) -> list[str]:
        """Return texts on how earlier tasks can influence a training, such as unseeded draws or optimizer state."""
        # Class attributes of plugins: ``seeds_tasks`` (seeds every task), ``commits_to_mask`` (restores all entries
        # outside the task's mask).
        found = []
        if not any(getattr(plugin, "seeds_tasks", False) for plugin in strategy.plugins):
            found.append("no SeedingPlugin makes every draw derive from the seed and the task")
        if not _isolates(strategy.model) and not any(getattr(p, "commits_to_mask", False) for p in strategy.plugins):
            found.append("without masks every task builds on what the others wrote")
        if not getattr(strategy, "optimizer_always_fresh", False):
            found.append("the optimizer's state outlived a task")
        for plugin in strategy.plugins:
            if not type(plugin).__module__.startswith("avalanche_amnesia.training.") and purger_of(plugin) is not None:
                found.append(f"plugin {type(plugin).__name__} keeps state from task to task")
        return found

    def _differing_trainings(self, trained: Mapping[int, Circumstances], strategy: Strategy) -> list[str]:
        """Return texts about how trainings differ from the first one in settings, plugins and modules' attributes."""
        if self._first is None:
            return []
        first, found = self._first, []
        other = [task for task, here in trained.items() if _comparable_settings(here) != _comparable_settings(first)]
        if other:
            found.append(f"{_as_text(other)} trained with other settings or plugins than the first task")
        for task, here in trained.items():
            if changed := texts.changed_attributes(first.attributes, here.attributes):
                found.append(f"{changed} differed from the first task's when task {task} began")
        if _plugin_classes(strategy) != first.plugins:
            found.append("the strategy now has other plugins than at the first training")
        return found


def _comparable_settings(training: Circumstances) -> tuple[Any, ...]:
    return training.settings, training.plugins, _learning_options(training)


def _learning_options(training: Circumstances) -> dict[str, Any]:
    return {name: value for name, value in training.options.items() if name not in _OF_EVALUATION}


def data_fingerprint(experience: Any) -> str:
    """Return an experience's task label and a hash of its class labels, as a text that identifies its data."""
    return f"{single_task(experience)}/{labels_fingerprint(experience)}"


def _as_text(tasks: Sequence[int]) -> str:
    return f"task {tasks[0]}" if len(tasks) == 1 else f"tasks {list(tasks)}"


def _isolates(model: Any) -> bool:
    """Return True if each task that may be unlearned has weights that no other task's training reads or changes."""
    return isinstance(model, MultiHeadModel) and model.isolates


def _influencing_tasks(strategy: Strategy, ledger: TaskLedger) -> frozenset[int]:
    """Return the tasks, not unlearned, that can influence the current training, directly or through another task."""
    remaining = frozenset(ledger.remaining)
    if _isolates(strategy.model):
        return frozenset()
    masking = next((p for p in strategy.plugins if getattr(p, "commits_to_mask", False)), None)
    if masking is None or masking.influences is None:
        return remaining
    seen: frozenset[int] = masking.influences
    return seen.union(*(ledger.saw(task) for task in seen & remaining)) & remaining


def _training_settings(strategy: Strategy) -> dict[str, Any]:
    """Return the current settings of strategy, plugins and the optimizer's groups, to compare with other trainings."""
    # The parameters that all tasks share, by name; each task adds its own.
    names = {id(p): name for name, p in strategy.model.named_parameters() if name.startswith("backbone.")}
    now = []
    for group in strategy.optimizer.param_groups:
        shared = str(sorted(names[id(p)] for p in group["params"] if id(p) in names))
        settings = {name: texts.as_text(value) for name, value in group.items() if name != "params"}
        now.append({**settings, "params": blake3(shared.encode()).hexdigest()})
    learning = [plugin for plugin in strategy.plugins if not getattr(plugin, "answers_requests", False)]
    casts = [f"{kind}: {dtype}" for kind, dtype in getattr(strategy, "autocast", ()) or autocast_now()]
    further = {"autocast": casts, "processes": n_processes() if n_processes() > 1 else None}
    further = {name: value for name, value in further.items() if value}
    return {**learning_settings(strategy, learning), "parameter groups": now, **further}


def _plugin_classes(strategy: Strategy) -> tuple[str, ...]:
    """Return the sorted class names of a strategy's plugins, without Avalanche's evaluation plugins and clock."""
    kinds = (type(plugin) for plugin in strategy.plugins if not isinstance(plugin, OF_THE_HOST))
    return tuple(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
