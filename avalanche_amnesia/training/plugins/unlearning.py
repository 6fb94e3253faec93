"""Plugin that carries out requests to unlearn, for any Avalanche strategy whose updates are recorded."""

import json
import time
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import trigger_plugins

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import ProofError, Provenance, UnlearningPlan, UnlearningRecord
from avalanche_amnesia.benchmarks.data import TaskError, labels_fingerprint, refuse_incremental, single_task
from avalanche_amnesia.benchmarks.requests import UnlearningRequest
from avalanche_amnesia.ledger import RequestError, TaskLedger
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.optimizers import follow_model
from avalanche_amnesia.saving.encoding import OwnFile
from avalanche_amnesia.saving.strategy_settings import OF_THE_HOST, origin_of
from avalanche_amnesia.saving.values import checked, create
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training.host.lookup import find_plugin, listens, refuse_second, refuse_unfinished
from avalanche_amnesia.training.host.parts_of_tasks import ForgottenPositions, LastStream, TrialDone, make_retraining
from avalanche_amnesia.training.host.rollback import abort_training, finish_task, is_finishing, restore_snapshot
from avalanche_amnesia.training.host.stream_requests import StreamRequests, check_iteration, check_iterations, due
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskEndPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.task_in_training import TaskSnapshot, copy_finished
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.applying import TrainAgain, apply, apply_to_ledger_only, name_broken_plugin
from avalanche_amnesia.unlearning.claims import Claims
from avalanche_amnesia.unlearning.compensation import can_revise, is_compensation, is_repair
from avalanche_amnesia.unlearning.context import UnlearningContext
from avalanche_amnesia.unlearning.planning import limit_to_own_modules, make_plan
from avalanche_amnesia.unlearning.purging import purgers

ObeyMode = Literal[True, False, "head"]
Deletion = Literal["updates", "exclusive"]
_NO_PURGER = (SeedingPlugin, InMemoryLoaderPlugin, TaskEndPlugin, TrajectoryPlugin, *OF_THE_HOST)
"""Plugins that need no purger, because other code removes their data."""


class UnlearningPlugin(Plugin):
    """Plugin that keeps the ledger (list of all tasks), answers the stream's requests to unlearn, and unlearns tasks.

    Needs a :class:`TrajectoryPlugin`. Requests come from the experiences of
    :func:`~avalanche_amnesia.benchmarks.with_unlearning`, or from :meth:`unlearn`. In a training the plugin runs
    after all learning plugins, so that their data of the new task can be purged. Around each unlearning it triggers
    ``before_unlearning`` and ``after_unlearning`` on plugins, metrics and loggers.

    Args:
        keep_probes: whether metrics may keep the mask and the head of a task that the stream requests to unlearn, to
            measure how well the task was forgotten. This residue of the task exists only in the metrics.
        deadline: number of further tasks, at least 1, after whose training a task becomes permanent; by default the
            stream's deadline.
        allow_unknown: accept plugins whose learned state no purger (registered function) can clean: it stays, and the
            record names them. By default every request is refused if there is such a plugin.
        deletion: ``updates`` removes a task's whole update; ``exclusive`` (as in HAT-CL, for comparison) resets to
            their initial bits only entries that no remaining task uses: no remaining task's logits change, and shared
            entries keep the update (``record.plan.shared``). None: ``exclusive`` for masks over weights (WSN), else
            ``updates``.
        obey: for controls: ``False`` enters requests into the ledger, and announces them, but does not change the
            model; ``"head"`` removes the tasks' heads, masks, norms and samples in Avalanche's plugins, and changes
            no weight that tasks share or could share.
        reproduce: before a task is retrained without some samples, retrain it with all of them, and refuse the request
            if its bits differ from the old ones; the argument of :meth:`unlearn` overrides this.
    """

    answers_requests = True
    finishing_step = 3

    def __init__(
        self,
        *,
        keep_probes: bool = True,
        deadline: int | None = None,
        allow_unknown: bool = False,
        deletion: Deletion | None = None,
        obey: ObeyMode = True,
        reproduce: bool = True,
    ) -> None:
        super().__init__()
        checks.one_of("obey", obey, ObeyMode)
        if deletion is not None:
            checks.one_of("deletion", deletion, Deletion)
        checks.one_of("reproduce", reproduce, Literal[True, False])
        self.obey, self.deletion, self.reproduce = obey, deletion, reproduce
        self.allow_unknown = allow_unknown
        self.keep_probes = keep_probes
        self.ledger = TaskLedger(deadline)
        self.records: list[UnlearningRecord] = []
        self.current: UnlearningPlan | None = None
        self.keeps_probes = False
        self.deadline = deadline
        self.counters: dict[int, int] = {}
        self.data: dict[int, str] = {}
        self.current_task: int | None = None
        self._before: Any = None  # log of claims before the current task
        self._forgotten_in_task: set[int] = set()
        self._upcoming: list[Any] = []
        self._requests = StreamRequests()
        self.claims = Claims()
        self.forgotten = ForgottenPositions()
        self.stream = LastStream()

    # In a saved state -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return this plugin's state to save: ledger (list of tasks), records, claims, data hashes, open requests."""
        return {
            "ledger": self.ledger.state_dict(),
            "records": [OwnFile(json.loads(record.to_json())) for record in self.records],
            "counters": self.counters,
            "data": self.data,
            "requests": self._requests.state(),
            "claims": self.claims.state(),
            "forgotten": dict(vars(self.forgotten)),
        }

    def load_state(self, state: Any) -> None:
        """Restore a state that :meth:`state` returned."""
        of_tasks = {"counters": dict[int, int], "data": dict[int, str]}
        kinds = {"ledger": dict, "records": list, **of_tasks, "requests": dict, "claims": dict, "forgotten": dict}
        ledger, records, counters, data, requests, claims, forgotten = checked(state, **kinds)
        self.ledger.load_state_dict(ledger)
        self.claims.load_state(claims)
        self._requests.load_state(requests)
        self.counters, self.data, self.forgotten = counters, data, create(ForgottenPositions, forgotten)
        self.records = [UnlearningRecord.from_json(json.dumps(record)) for record in records]

    # By the user ----------------------------------------------------------------------------------------------

    def plan(
        self, strategy: Strategy, tasks: Iterable[int] | UnlearningRequest = (), *, data: Any = None, **parts: Any
    ) -> UnlearningPlan:
        """Return the plan of an unlearning, a list of changes; see :meth:`TaskStrategy.plan_unlearning`."""
        request = _request(tasks, **parts)
        context = self.prepared(strategy, getattr(request, "tasks", request))
        make_retraining(self, strategy, request, context, data)
        return context.plan

    def prepared(self, strategy: Strategy, tasks: Iterable[int]) -> UnlearningContext:
        """Return the context of an unlearning of ``tasks``: its plan, and the objects to carry it out; change nothing.

        Raises:
            RequestError: if the tasks can't be requested now.
        """
        return self._make_context(strategy, tasks, self._current_event(strategy), allow_unknown=True, strict=False)

    def unlearn(
        self,
        strategy: Strategy,
        tasks: Iterable[int] | UnlearningRequest = (),
        *,
        data: Any = None,
        keep_probes: bool = False,
        allow_unknown: bool | None = None,
        strict: bool = False,
        reproduce: bool | None = None,
        **parts: Any,
    ) -> UnlearningRecord:
        """Unlearn tasks now, outside a training call; see :meth:`TaskStrategy.unlearn`.

        For stock strategies, which have no such method: ``strategy`` is the one that this plugin belongs to.
        """
        event = self._current_event(strategy)
        request = _request(tasks, **parts)
        record = self._unlearn(strategy, request, event, keep_probes, allow_unknown, strict, data, reproduce)
        of_interrupted = strategy.is_training and strategy.experience is not None  # else Avalanche has cleaned up
        if of_interrupted and not getattr(strategy, "_trains", True):
            strategy.experience, strategy.adapted_dataset, strategy.dataloader = None, None, []
            strategy.mbatch, strategy.mb_output, strategy.loss = None, None, torch.zeros(())
            follow_model(strategy, fresh=False)
        return record

    def prove(
        self, strategy: Strategy, references: Any, *, tasks: Iterable[int] = (), quiet: bool = False
    ) -> UnlearningRecord:
        """Prove the last unlearning's record by retraining without the unlearned data; see :meth:`TaskStrategy.prove`.

        Args:
            strategy: the one that this plugin belongs to.
            references: :class:`~avalanche_amnesia.evaluation.References` of the run.
            tasks: as of :meth:`TaskStrategy.prove`.
            quiet: do not announce the proof to loggers.
        """
        event = self._current_event(strategy)
        if not self.records:
            raise RequestError(f"{event}: nothing was unlearned, and a proof belongs to a record: unlearn a task first")
        self.claims.check_processes()
        *before, last = self.records
        failure: ProofError | None = None
        try:
            record: UnlearningRecord = references.of(self).prove(last, tasks=tasks, strategy=strategy)
        except ProofError as error:
            failure, record = error, error.record
            self.claims.disprove(error.tasks, record.reasons[-1])
        else:
            record = last if last.proved and not record.proved else record  # a proof of fewer tasks
        self.records = [*before, record]
        if not quiet:
            trigger_plugins(strategy, "after_proof")
        if failure is not None:
            raise failure
        return record

    def mark_permanent(self, tasks: Iterable[int]) -> None:
        """Declare trained tasks permanent, so that no later request can unlearn them.

        Raises:
            RequestError: if one of them does not remain.
        """
        self.ledger.declare_permanent(tasks)

    def _current_event(self, strategy: Strategy) -> str:
        refuse_unfinished(strategy)
        # Less strict than for saving: a training that failed before its first step has changed nothing.
        snapshot = self._snapshot(strategy)
        if snapshot is not None or self.current_task is not None or is_finishing(strategy):
            task = self.current_task if snapshot is None else snapshot.task
            raise RequestError(
                f"task {task} is in training, or was interrupted: put UnlearningRequest(..., when='iteration') "
                "into the stream, or give the task up, strategy.abort_training() or UnlearningPlugin.abort(strategy)"
            )
        return f"after {self.ledger.n_trained} trainings"

    def abort(self, strategy: Strategy) -> None:
        """Undo an interrupted training. Tasks unlearned during the training stay unlearned."""
        abort_training(strategy)

    def undo_training(self, strategy: Strategy) -> None:
        """Undo an aborted training: roll back the task's final steps, if begun; drop this plugin's data on the task."""
        restore_snapshot(strategy)
        self.current = None
        self.claims.restore_log(self._before, strategy.model, none_finished=self.ledger.n_trained == 0)
        self.current_task, self._before = None, None

    @property
    def trained(self) -> tuple[int, ...]:
        """Return all tasks trained so far, unlearned ones included, in the order of their last training."""
        return tuple(sorted({*self.ledger.remaining, *self.ledger.unlearned}, key=self.counters.__getitem__))

    # By the stream --------------------------------------------------------------------------------------------

    def before_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the training: place this plugin after learning plugins, undo an aborted task, run overdue requests."""
        # This plugin runs after learning plugins and metrics, before the last two. Waiting requests run now, before any
        # plugin checks whether the task is new.
        refuse_second(strategy, UnlearningPlugin)
        self.current = None  # an unlearning may have been interrupted at its last line
        last = (PeriodicEval, Clock)
        others = [plugin for plugin in strategy.plugins if plugin is not self]
        position = next((i for i, plugin in enumerate(others) if isinstance(plugin, last)), len(others))
        strategy.plugins = [*others[:position], self, *others[position:]]
        if self.current_task is not None or is_finishing(strategy):
            abort_training(strategy)
        if strategy.clock.train_exp_counter in self.counters.values():  # after an error, the clock was not advanced
            strategy.clock.train_exp_counter += 1
        self._carry_out_overdue(strategy)  # before any plugin prepares for the next task: one may be trained again

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: check the task and its requests to unlearn; carry out those due before the task."""
        experience, task = strategy.experience, single_task(strategy.experience)
        self._trajectory_plugin(strategy)
        self._set_keeps_shared_entries(strategy.model)
        self.claims.note_changed_tensors(strategy.model)
        if self.current is not None:  # trained again inside an unlearning: its requests were answered long ago
            return
        if not (self.ledger.n_trained or getattr(strategy.model, "additive", False)):
            refuse_incremental(experience)
        self.stream.remember(experience)
        check_iterations(strategy)
        if self.ledger.n_trained == 0 and self.deadline is None:
            self.ledger = TaskLedger(getattr(experience, "deadline", None))
        if getattr(experience, "requests", ()) and self.obey and not self.allow_unknown:
            purgers.refuse_unknown_state(self._find_purgers(strategy)[1])
        self._requests.dry_run(experience, self.ledger)
        self.current_task, self._before, self._forgotten_in_task = None, None, set()
        for request in self._requests.still_due(experience, "before", self.ledger.unlearned):
            self._carry_out(strategy, request, task)

    def after_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Raise TaskError for a training on several new tasks (JointTraining): the tasks would share one update."""
        known = {single_task(strategy.experience), *self.ledger.remaining, *self.ledger.unlearned}
        labels = getattr(strategy.adapted_dataset, "targets_task_labels", None)
        if new := set() if labels is None else {int(task) for task in labels.uniques} - known:
            raise TaskError(
                f"{type(strategy).__name__} trains tasks {sorted(new | {single_task(strategy.experience)})} in one "
                "training, and could unlearn none alone. Train one after another, or leave UnlearningPlugin out"
            )

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: check requests due in the task, note tasks that influence it, prepare plugins."""
        self.current_task = single_task(strategy.experience)
        self._before = self.claims.begin_training(strategy, self.ledger)
        for plugin in (*strategy.plugins, strategy):
            purgers.prepare_training(plugin, self.current_task)
        self._upcoming = self._requests.still_due(strategy.experience, "iteration", self.ledger.unlearned)
        for request in self._upcoming:
            check_iteration(request, self.current_task, strategy.train_epochs * len(strategy.dataloader))
        for plugin in strategy.plugins:
            if can_revise(plugin):
                plugin.begin(strategy, self.current_task, self.ledger.unlearnable)

    def before_training_iteration(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an iteration: carry out requests to unlearn due now; drop unlearned samples from the mini-batch."""
        if strategy.clock.train_exp_iterations == 0:
            task, adds = single_task(strategy.experience), getattr(strategy.model, "additive", False)
            earlier = self._before.get(task) if adds and task in self.ledger.remaining else None
            self.claims.first_step(strategy, task, kwargs, earlier)
        while self._upcoming and self._upcoming[0].iteration <= strategy.clock.train_exp_iterations:
            request = self._upcoming.pop(0)
            with Transaction() as kept:  # an evaluation inside would overwrite these attributes
                kept.keep(strategy, "mbatch", "mb_output", "loss", "_eval_streams")
                self._carry_out(strategy, request, single_task(strategy.experience))
            self._forgotten_in_task.update(request.tasks)
        if self._forgotten_in_task:
            keep = (sum(strategy.mbatch[-1] == removed for removed in self._forgotten_in_task) == 0).nonzero()[:, 0]
            if len(keep) < len(strategy.mbatch[-1]):
                strategy.mbatch = [part[keep] for part in strategy.mbatch]

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: enter the task into the ledger; carry out requests to unlearn due after it."""
        task = single_task(strategy.experience)
        reads: Iterable[int] = ()
        if isinstance(strategy.model, MultiHeadModel):
            strategy.model.close_classes(task, getattr(strategy.experience, "closed_classes", ()))
            reads = strategy.model.tasks_read(task)
        again = self.current is not None  # inside an unlearning: the ledger has the task already
        if not again:
            before = self.data[task] if task in self.ledger.remaining else ""  # by the task's earlier parts
            if not before:
                self.ledger.learn(task, saw=self.claims.influences)
            # If a run skips tasks of its stream, a task may be read before its deadline: then it becomes permanent now.
            permanent = [task] if getattr(strategy.experience, "permanent", False) else []
            self.ledger.declare_permanent({*permanent, *reads}.intersection(self.ledger.remaining))
            self.counters[task] = strategy.clock.train_exp_counter
            self.data[task] = labels_fingerprint(strategy.experience, before)
            self._requests.end_task(task, due(strategy.experience, "after"))
        for plugin in strategy.plugins:
            if is_compensation(plugin):
                plugin.prepare(strategy, task, self.ledger.unlearnable)
        self.claims.end_training(task, strategy, self._forgotten_in_task)
        self.current_task, self._before = None, None
        finish_task(self, strategy)
        if not again:
            self._carry_out_overdue(strategy)

    def _carry_out_overdue(self, strategy: Strategy) -> None:
        """Carry out all requests to unlearn due after finished tasks, also requests delayed by an interruption."""
        for task, request in self._requests.overdue_requests(self.ledger.unlearned):
            try:
                self._unlearn(strategy, request, request.event(task), self.keep_probes)
            except RequestError:  # the same request would fail again
                self._requests.mark_answered(request)
                raise

    def _carry_out(self, strategy: Strategy, request: Any, task: int) -> None:
        self._requests.mark_started(task, request)
        self._unlearn(strategy, request, request.event(task), self.keep_probes)

    # The operation --------------------------------------------------------------------------------------------

    def _unlearn(
        self,
        strategy: Strategy,
        request: Iterable[int] | UnlearningRequest,
        event: str,
        keep_probes: bool,
        allow_unknown: bool | None = None,
        strict: bool = False,
        data: Any = None,
        reproduce: bool | None = None,
    ) -> UnlearningRecord:
        tasks: Any = getattr(request, "tasks", request)
        reproduce = self.reproduce if reproduce is None else reproduce
        checks.one_of("reproduce", reproduce, Literal[True, False])
        if self.current is not None:
            raise RequestError(f"{event}: tasks {list(self.current.tasks)} are being unlearned; ask again after that")

        def announce(name: str, record: UnlearningRecord | None, change: Transaction) -> None:
            if record is not None:
                change.keep(self._requests, "waiting")
                self._requests.mark_answered(request)
                removed = record.plan.tasks
                data = {task: digest for task, digest in self.data.items() if task not in removed}
                change.set(
                    self, records=[*self.records, record], data=data, forgotten=self.forgotten.without_tasks(removed)
                )
                self.forget(strategy, removed, change)
            began = time.perf_counter()
            with name_broken_plugin(strategy, name):
                trigger_plugins(strategy, name)
            context.started += time.perf_counter() - began  # metrics and loggers are no part of the unlearning
            if record is not None and snapshot is not None:  # heads written by compensations
                change.set(snapshot, finished=copy_finished(strategy.model))

        snapshot = self._snapshot(strategy)
        if snapshot is not None:  # undo a plugin's writes into finished tasks' heads
            snapshot.restore_finished_tasks(strategy.model)
        may_stay = not self.obey or (self.allow_unknown if allow_unknown is None else allow_unknown)

        def prepare() -> tuple[UnlearningContext, TrainAgain | None, TrainAgain | None]:
            made = self._make_context(strategy, tasks, event, allow_unknown=may_stay, strict=strict)
            return made, *make_retraining(self, strategy, request, made, data, reproduce=reproduce)

        context, retrain_without, reproduce_training = prepare()
        trained = {str(task): digest for task, digest in sorted(self.data.items())}
        provenance = Provenance(data=trained, **origin_of(strategy))
        try:
            self.current, self.keeps_probes = context.plan, keep_probes
            if not self.obey:
                return apply_to_ledger_only(context, announce, provenance)
            if reproduce_training is not None and reproduce:
                (task,) = context.tasks
                first = self.claims.training_of(task)
                try:
                    apply(context, self.claims, lambda *given: None, provenance, reproduce_training)
                except TrialDone as found:
                    found.check(task, context.hashes, first.place, event)
                started, (context, retrain_without, _) = context.started, prepare()
                context.started = started  # the record's seconds include the reproduction
            return apply(context, self.claims, announce, provenance, retrain_without)
        finally:
            self.current = None

    def forget(self, strategy: Strategy, tasks: Collection[int], change: Transaction) -> None:
        """Delete traces of unlearned ``tasks``: the evaluator's results, and states in the current task's snapshot."""
        # Avalanche repeats the last value of every metric for ever, as if the model still knew a forgotten task.
        ends, last = tuple(f"/Task{task:03d}" for task in tasks), strategy.evaluator.last_metric_results
        results = {name: value for name, value in last.items() if not any(end in name for end in ends)}
        change.set(strategy.evaluator, last_metric_results=results)
        snapshot = self._snapshot(strategy)
        if snapshot is not None:
            # optimizer moments and plugin states may contain the tasks: aborting must not restore them
            change.set(snapshot, moments={}, states=())

    def _make_context(
        self, strategy: Strategy, tasks: Iterable[int], event: str, *, allow_unknown: bool, strict: bool
    ) -> UnlearningContext:
        """Check a request to unlearn and return the unlearning's context, with the plan; remove nothing yet."""
        recorder = self._trajectory_plugin(strategy)
        self._set_keeps_shared_entries(strategy.model)
        ledger, snapshot = self.ledger, self._snapshot(strategy)
        unrecorded = frozenset(getattr(strategy.model, "tasks", ())) - {*ledger.remaining, self.current_task}
        tasks = ledger.check(tasks, event, self._requests.known or None, unrecorded)
        cleaned, unknown = self._find_purgers(strategy)
        if not allow_unknown:
            purgers.refuse_unknown_state(unknown)
        context = UnlearningContext(
            strategy=strategy,
            tasks=tasks,
            event=event,
            ledger=ledger,
            trajectory=recorder.trajectory,
            counters=self.counters,
            purgers=cleaned,
            unknown=[obj for obj, _ in unknown],
            compensations=[p for p in strategy.plugins if is_compensation(p)] if self.obey is True else [],
            repair=next(filter(is_repair, strategy.plugins), None),
            shared_state=recorder.shared_state,
            has_listeners=any(listens(plugin, "before_unlearning") for plugin in strategy.plugins),
            before=None if snapshot is None else snapshot.values,
            in_training=self.current_task,
            unrecorded=unrecorded,
        )
        make_plan(context, self.claims, strict=strict)
        if self.obey == "head":
            limit_to_own_modules(context)
        return context

    def _find_purgers(self, strategy: Strategy) -> tuple[list[tuple[object, purgers.Purger]], purgers.UnknownState]:
        """Return pairs of object and purger (function that removes tasks), and the learned state that has no purger."""
        others = [
            plugin
            for plugin in strategy.plugins
            if not (plugin is self or isinstance(plugin, _NO_PURGER) or is_compensation(plugin) or is_repair(plugin))
        ]
        found = [(obj, purgers.purger_of(obj)) for obj in (*others, strategy, strategy._criterion)]
        unknown = purgers.unknown_state(strategy, [obj for obj, purge in found if purge is None])
        # Tensors of a criterion are settings, unless they have changed.
        kept = [
            (obj, path)
            for obj, path in unknown
            if obj is not strategy._criterion or self.claims.has_criterion_changed(strategy)
        ]
        return [(obj, purge) for obj, purge in found if purge is not None], kept

    def _set_keeps_shared_entries(self, model: Any) -> None:
        """Set ``model.keeps_shared_entries`` (unlearning changes no entry that another task uses) by ``deletion``."""
        if self.deletion == "exclusive" and not isinstance(model, TaskMaskedModel):
            raise TypeError(f"deletion='exclusive' needs a model with masks, got {type(model).__name__}, a shared one")
        if self.deletion is not None:
            model.keeps_shared_entries = self.deletion == "exclusive"

    def _snapshot(self, strategy: Strategy) -> TaskSnapshot | None:
        """Return the copy of model and optimizer from before the current task, to undo it; None between tasks."""
        return self._trajectory_plugin(strategy).snapshot

    def _trajectory_plugin(self, strategy: Strategy) -> TrajectoryPlugin:
        if self not in strategy.plugins:
            raise RequestError(
                f"{type(strategy).__name__} does not have this UnlearningPlugin, which has no record of its "
                "tasks: keep the one that you gave to plugins=[TrajectoryPlugin(), UnlearningPlugin()], and call that"
            )
        plugin = find_plugin(strategy, TrajectoryPlugin)
        if plugin is None:
            raise RequestError(
                f"{type(strategy).__name__} records no trajectory: plugins=[TrajectoryPlugin(), UnlearningPlugin()]"
            )
        return plugin


def _request(
    tasks: Iterable[int] | UnlearningRequest,
    task: int | None = None,
    samples: Iterable[int] = (),
    classes: Iterable[int] = (),
) -> Any:
    """Return the arguments of ``unlearn`` as one request: the tasks, or UnlearningRequest for samples or classes."""
    samples = checks.integers("samples", samples, "positions in the data of the task")
    classes = checks.integers("classes", classes, "labels in the data of the task")
    if task is None and not samples and not classes:
        return tasks
    made = UnlearningRequest(tasks, task=task, samples=samples, classes=classes)  # type: ignore[arg-type]
    if task is None:
        raise RequestError(f"samples or classes: give unlearn(task={made.tasks[0]}, …), not tasks {[*made.tasks]}")
    return made
