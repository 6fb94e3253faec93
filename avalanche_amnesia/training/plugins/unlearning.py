"""Obeys unlearning requests, on any Avalanche strategy that records its trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import trigger_plugins

from avalanche_amnesia import checks
from avalanche_amnesia.audit.provenance import provenance_of
from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.repair.plugin import RepairPlugin
from avalanche_amnesia.contrib.residue_search.evidence import Evidence
from avalanche_amnesia.ledger import RequestError, TaskLedger
from avalanche_amnesia.training.host.evaluation import drop_last_values, preserved_minibatch
from avalanche_amnesia.training.host.history import TaskHistory
from avalanche_amnesia.training.host.lookup import find_plugin, refuse_second
from avalanche_amnesia.training.host.rollback import abort_training, finish, go_back, is_finishing
from avalanche_amnesia.training.host.stream_requests import StreamRequests, check_iteration, check_iterations, due
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskError, TaskMaskPlugin, single_task
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.applying import apply, ledger_only
from avalanche_amnesia.unlearning.claims import Claims
from avalanche_amnesia.unlearning.compensation import compensates, revises
from avalanche_amnesia.unlearning.host import Host, refuse_unknown_state, unknown_state
from avalanche_amnesia.unlearning.planning import Unlearning, own_modules_only, prepare
from avalanche_amnesia.unlearning.purging.registry import prepare_training

Obedience = Literal[True, False, "head"]
_OURS = (SeedingPlugin, InMemoryLoaderPlugin, TaskMaskPlugin, TrajectoryPlugin, RepairPlugin)
"""Plugins that are cleaned elsewhere, or hold nothing of a task."""


class UnlearningPlugin(SupervisedPlugin):
    """Keeps the ledger of tasks, fires the stream's requests, and unlearns.

    Needs a :class:`TrajectoryPlugin` beside it. Requests come from the experiences of
    :func:`~avalanche_amnesia.benchmarks.with_unlearning`, or from :meth:`unlearn`. While training it moves itself
    behind every plugin that learns, so that what those store of a task just trained is purged as well. Around each
    unlearning it triggers ``before_unlearning`` and ``after_unlearning`` on plugins, metrics and loggers.

    Args:
        keep_probes: whether metrics may keep the mask and the head of a task that a request of the stream names, to
            measure how well it was forgotten. They are residue of the task, kept in the metrics alone.
        deadline: a task becomes permanent by itself once this many further tasks have been trained; by default the
            stream's.
        allow_unknown: leave plugins that keep learned state and have no purger as they are, and say so in the record,
            instead of refusing every request.
        fingerprint: let every record keep hashes and sketches by which an audit recognises what was removed, see
            :class:`~avalanche_amnesia.audit.Fingerprint`.
        obey: for controls: ``False`` enters requests into the ledger, and announces them, but changes nothing else;
            ``"head"`` takes out what the tasks have of their own (heads, masks, norms, samples in the host's plugins)
            and leaves every entry that tasks share as it is.

    Attributes:
        ledger: of the tasks: trained, permanent, unlearned.
        records: one :class:`UnlearningRecord` per unlearning, in order.
        history: counters and data of the tasks that were trained.
        claims: what trainings could see, which decides whether a record may say ``exact``.
        current: the plan being applied, for metrics and loggers; None outside.
        current_task: the task in training; None between tasks.
    """

    repeatable = True
    answers_requests = True

    finishing_step = 3

    def __init__(
        self,
        *,
        keep_probes: bool = True,
        deadline: int | None = None,
        allow_unknown: bool = False,
        fingerprint: bool = False,
        obey: Obedience = True,
    ) -> None:
        super().__init__()
        checks.one_of("obey", obey, Obedience)
        self.obey = obey
        self.allow_unknown = allow_unknown
        self.fingerprint = fingerprint
        self.keep_probes_of_stream = keep_probes
        self.ledger = TaskLedger(deadline)
        self.records: list[UnlearningRecord] = []
        self.current: UnlearningPlan | None = None
        self.keeps_probes = False
        self._given_deadline = deadline
        self.history = TaskHistory()
        self.current_task: int | None = None
        self._forgotten_in_task: set[int] = set()
        self._upcoming: list[Any] = []
        self._requests = StreamRequests()
        self.claims = Claims()

    # By the user ----------------------------------------------------------------------------------------------

    def plan(self, strategy: Any, tasks: Iterable[int]) -> UnlearningPlan:
        """Plan of what unlearning these tasks now would change; changes nothing.

        Raises:
            RequestError: if they can't be requested now.
        """
        return self._prepare(strategy, tasks, self._between_tasks(strategy)).plan

    def unlearn(
        self,
        strategy: Any,
        tasks: Iterable[int],
        *,
        keep_probes: bool = False,
        allow_unknown: bool | None = None,
        fingerprint: bool | None = None,
        strict: bool = False,
    ) -> UnlearningRecord:
        """Unlearn tasks now, outside a training call: as a whole, or not at all.

        Args:
            strategy: the strategy that this plugin belongs to.
            tasks: labels of remaining, not permanent tasks.
            keep_probes: whether metrics may keep the tasks' masks and heads.
            allow_unknown: this time, in place of the plugin's own ``allow_unknown``.
            fingerprint: this time, in place of the plugin's own ``fingerprint``.
            strict: raise where something else than trainings and unlearnings here wrote into the model, instead of
                saying so in the record.

        Raises:
            RequestError: if they can't be requested now; nothing changed.
            UnknownStateError: if a plugin, or the strategy, keeps learned state and has no purger; nothing changed.
            TamperedError: where ``strict`` says so; nothing changed.
        """
        event = self._between_tasks(strategy)
        return self._unlearn(strategy, tasks, event, keep_probes, allow_unknown, fingerprint, strict)

    def evidence(self, strategy: Any, tasks: Iterable[int], experiences: Iterable[Any] = ()) -> Evidence:
        """Evidence of what tasks have put into the model, to be looked for after they are unlearned; changes nothing.

        Args:
            strategy: the strategy that this plugin belongs to.
            tasks: that could be unlearned now.
            experiences: the tasks' data, if their samples shall be looked for too.

        Raises:
            RequestError: if the tasks can't be requested now.
        """
        unlearning = prepare(self._host(strategy), self.claims, tasks, self._between_tasks(strategy))
        samples = [task_data(experience)[0] for experience in experiences]
        return unlearning.evidence(torch.cat(samples) if samples else None)

    def mark_permanent(self, tasks: Iterable[int]) -> None:
        """Declare remaining tasks permanent: never to be requested again.

        Raises:
            RequestError: if one of them does not remain.
        """
        self.ledger.declare_permanent(tasks)

    def _between_tasks(self, strategy: Any) -> str:
        trajectory = self._trajectory(strategy)
        if trajectory.snapshot is not None or self.current_task is not None or is_finishing(strategy):
            task = self.current_task if trajectory.snapshot is None else trajectory.snapshot.task
            raise RequestError(
                f"task {task} is in training, or its training was interrupted: to unlearn in the "
                "middle of a task put UnlearningRequest(..., when='iteration') into the stream; to give an interrupted "
                "task up call strategy.abort_training(), or UnlearningPlugin.abort(strategy) of a stock strategy"
            )
        return f"after {self.ledger.n_trained} trainings"

    def abort(self, strategy: Any) -> None:
        """Give up a task whose training was interrupted; what its requests unlearned stays unlearned."""
        abort_training(strategy)

    def undo_training(self, strategy: Any) -> None:
        """Forget the task in training, which is given up."""
        go_back(strategy)
        self.current = None
        self.claims.abandon(self.current_task, strategy.model, first=self.ledger.n_trained == 0)
        self.current_task = None

    @property
    def trained(self) -> tuple[int, ...]:
        """Every task trained so far, unlearned ones included, in the order of their (last) training."""
        tasks = {*self.ledger.remaining, *self.ledger.unlearned}
        return tuple(sorted(tasks, key=self.history.counters.__getitem__))

    # By the stream --------------------------------------------------------------------------------------------

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Move behind all plugins but the host's last two: those that learn must have learned, and metrics seen it.

        And undo a training that was interrupted, before any plugin looks whether the task is a new one.
        """
        refuse_second(strategy, UnlearningPlugin)
        self._refuse_foreign_logs(strategy)
        last = (PeriodicEval, Clock)
        others = [plugin for plugin in strategy.plugins if plugin is not self]
        position = next((i for i, plugin in enumerate(others) if isinstance(plugin, last)), len(others))
        strategy.plugins = [*others[:position], self, *others[position:]]
        if self.current_task is not None or is_finishing(strategy):
            abort_training(strategy)
        if strategy.clock.train_exp_counter in self.history.counters.values():  # an error kept the clock from ticking
            strategy.clock.train_exp_counter += 1

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Check everything that can be wrong with the task and its requests; fire those that come before it."""
        experience, task = strategy.experience, single_task(strategy.experience)
        self._trajectory(strategy)
        self.claims.look_before_training(strategy.model)
        self._obey_overdue(strategy)
        check_iterations(strategy)
        if self.ledger.n_trained == 0 and self._given_deadline is None:
            self.ledger = TaskLedger(getattr(experience, "deadline", None))
        if getattr(experience, "requests", ()) and self.obey and not self.allow_unknown:
            refuse_unknown_state(unknown_state(self._host(strategy)))
        self._requests.rehearse(experience, self.ledger)
        self.current_task, self._forgotten_in_task = None, set()
        for request in self._requests.still_due(experience, "before", self.ledger.unlearned):
            self._obey(strategy, request, task)

    def after_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Refuse one training over several tasks that are new (JointTraining): they would leave one update.

        Raises:
            TaskError: for such a training; nothing changed.
        """
        known = {single_task(strategy.experience), *self.ledger.remaining, *self.ledger.unlearned}
        labels = getattr(strategy.adapted_dataset, "targets_task_labels", None)
        new = set() if labels is None else {int(task) for task in labels.uniques} - known
        if new:
            raise TaskError(
                f"{type(strategy).__name__} trains tasks {sorted(new | {single_task(strategy.experience)})} in one "
                "training, which leaves one update of them all: none of them could be unlearned alone. Train one task "
                "after another, or leave out TrajectoryPlugin and UnlearningPlugin"
            )

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check iterations against the real loader; note whose traces the task can carry; let others get ready."""
        self.current_task = single_task(strategy.experience)
        self.claims.begin(strategy, self.ledger)
        for plugin in (*strategy.plugins, strategy):
            prepare_training(plugin, self.current_task)
        self._upcoming = self._requests.still_due(strategy.experience, "iteration", self.ledger.unlearned)
        for request in self._upcoming:
            check_iteration(request, self.current_task, strategy.train_epochs * len(strategy.dataloader))
        for plugin in strategy.plugins:
            if revises(plugin):
                plugin.begin(strategy, self.current_task, self.ledger.unlearnable)

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Fire the requests of this iteration; keep samples of forgotten tasks out of a loader that still has them."""
        if strategy.clock.train_exp_iterations == 0:
            self.claims.first_step(strategy, single_task(strategy.experience))
        while self._upcoming and self._upcoming[0].iteration <= strategy.clock.train_exp_iterations:
            request = self._upcoming.pop(0)
            with preserved_minibatch(strategy):
                self._obey(strategy, request, single_task(strategy.experience))
            self._forgotten_in_task.update(request.tasks)
        if self._forgotten_in_task:
            forgotten = sum(strategy.mbatch[-1] == gone for gone in self._forgotten_in_task)
            keep = (forgotten == 0).nonzero()[:, 0]
            if len(keep) < len(strategy.mbatch[-1]):
                strategy.mbatch = [part[keep] for part in strategy.mbatch]

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Enter the task into the ledger, which finishes it; fire the requests that come after it."""
        task = single_task(strategy.experience)
        permanent = bool(getattr(strategy.experience, "permanent", False))
        self.ledger.learn(task, permanent=permanent, saw=self.claims.influences)
        self.history.end(task, strategy.experience, strategy.clock.train_exp_counter)
        for plugin in strategy.plugins:
            if compensates(plugin):
                plugin.prepare(strategy, task, self.ledger.unlearnable)
        self._requests.trained(task, due(strategy.experience, "after"))
        self.claims.end(task, strategy.model, self._forgotten_in_task)
        self.current_task = None
        finish(strategy)
        self._obey_overdue(strategy)
        recorder = self._trajectory(strategy)
        if recorder.merge_permanent:
            recorder.trajectory.merge(self.ledger.permanent)

    def _obey_overdue(self, strategy: Any) -> None:
        """Fire the requests that come after a task; those whom an interruption kept waiting, before the next one."""
        for task, request in self._requests.overdue(self.ledger.unlearned):
            try:
                self._unlearn(strategy, request.tasks, request.event(task), self.keep_probes_of_stream)
            except RequestError:  # asking again would bring the same answer
                self._requests.answered(task, request)
                raise
            self._requests.answered(task, request)

    def _refuse_foreign_logs(self, strategy: Any) -> None:
        recorder = find_plugin(strategy, TrajectoryPlugin)
        recorded = () if recorder is None else recorder.trajectory.tasks
        foreign = set(recorded) - {*self.ledger.remaining, *self.ledger.unlearned, self.current_task}
        if foreign:
            raise RequestError(
                f"the trajectory holds updates of tasks {sorted(foreign)}, which another strategy trained: give every "
                "strategy and reference a TrajectoryPlugin(path=...) of its own; to go on with that run give it the "
                "state that strategy.save(path) kept, by load_state(strategy, path)"
            )

    def _obey(self, strategy: Any, request: Any, task: int) -> None:
        self._requests.fires(task, request)
        self._unlearn(strategy, request.tasks, request.event(task), self.keep_probes_of_stream)

    # The operation --------------------------------------------------------------------------------------------

    def _unlearn(
        self,
        strategy: Any,
        tasks: Iterable[int],
        event: str,
        keep_probes: bool,
        allow_unknown: bool | None = None,
        fingerprint: bool | None = None,
        strict: bool = False,
    ) -> UnlearningRecord:
        if self.current is not None:
            raise RequestError(
                f"{event}: tasks {list(self.current.tasks)} are just being unlearned; ask again after that"
            )

        def announce(name: str, record: UnlearningRecord | None, change: Transaction) -> None:
            if record is not None:
                change.set(self, records=[*self.records, record])
                self.history.forget(record.tasks, change)
                drop_last_values(strategy.evaluator, record.tasks, change)
                self._drop_moments_before(strategy, change)
            trigger_plugins(strategy, name)

        may_stay = not self.obey or (self.allow_unknown if allow_unknown is None else allow_unknown)
        unlearning = self._prepare(strategy, tasks, event, strict=strict, allow_unknown=may_stay)
        self.current, self.keeps_probes = unlearning.plan, keep_probes
        try:
            if not self.obey:
                return ledger_only(unlearning, announce)
            kept = self.fingerprint if fingerprint is None else fingerprint
            return apply(unlearning, announce, fingerprint=kept)
        finally:
            self.current = None

    def _drop_moments_before(self, strategy: Any, change: Transaction) -> None:
        """Drop moments that mix a forgotten task's gradients: a task that is given up must not bring them back."""
        snapshot = self._trajectory(strategy).snapshot
        if snapshot is not None:
            change.set(snapshot, moments={})

    def _prepare(self, strategy: Any, tasks: Iterable[int], event: str, **options: bool) -> Unlearning:
        unlearning = prepare(self._host(strategy), self.claims, tasks, event, **options)
        return own_modules_only(unlearning) if self.obey == "head" else unlearning

    def _host(self, strategy: Any) -> Host:
        """The strategy as an unlearning sees it: what is ours in it, and what is the host's."""
        recorder = self._trajectory(strategy)
        compensations = [p for p in strategy.plugins if compensates(p)]
        kinds = (EvaluationPlugin, *_OURS)
        ours = [p for p in strategy.plugins if p is self or isinstance(p, kinds) or compensates(p)]
        learned = [strategy._criterion] if self.claims.criterion_learned(strategy) else []
        return Host(
            strategy=strategy,
            ledger=self.ledger,
            trajectory=recorder.trajectory,
            before=None if recorder.snapshot is None else recorder.snapshot.values,
            in_training=self.current_task,
            plugins=[*(p for p in strategy.plugins if p not in ours), strategy, *learned],
            others=[*ours, strategy.evaluator],
            masking=find_plugin(strategy, TaskMaskPlugin),
            compensations=compensations if self.obey is True else [],
            repair=find_plugin(strategy, RepairPlugin),
            counters=self.history.counters,
            provenance=provenance_of(strategy, self.history.data),
            known=frozenset(self._requests.known) or None,
            shared_state=recorder.shared_state,
        )

    def _trajectory(self, strategy: Any) -> TrajectoryPlugin:
        if self not in strategy.plugins:
            raise RequestError(
                f"this UnlearningPlugin is none of {type(strategy).__name__}'s plugins, and knows nothing of its "
                "tasks: keep the one that you gave to plugins=[TrajectoryPlugin(), UnlearningPlugin()], and call that"
            )
        plugin = find_plugin(strategy, TrajectoryPlugin)
        if plugin is None:
            raise RequestError(
                f"{type(strategy).__name__} records no trajectory, without which nothing can be unlearned: "
                "plugins=[TrajectoryPlugin(), UnlearningPlugin()]"
            )
        return plugin
