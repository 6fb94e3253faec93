"""Base plugins of methods that train each task under a mask over units or weights."""

import warnings
from typing import Any, ClassVar, Literal

import torch

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, refuse_incremental, repeat_error, single_task, task_data
from avalanche_amnesia.models.multi_head import MultiHeadModel, backbone_entries
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.optimizers import follow_model, traits_of
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.seeding import derive_seed, preserved_rng
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training import task_faults
from avalanche_amnesia.training.hat_formulas import LayerSparsity
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.host.lookup import sees_final_gradients
from avalanche_amnesia.training.host.rollback import abort_training, begin_task_end, finish_task, restore_snapshot
from avalanche_amnesia.training.task_in_training import TaskInTraining, TaskSnapshot
from avalanche_amnesia.training.update_rules import Adjuster, AdjustmentRule, TaskUse
from avalanche_amnesia.unit_graph.findings import ModelError


class DivergedError(RuntimeError):
    """Error for a task whose weights are infinite or NaN, or whose features overflow. Its training was undone."""


class TaskEndPlugin(Plugin):
    """Base plugin that finishes a task: fits its head, emits warnings, removes its parameters from the optimizer."""

    finishing_step = 1
    model_class: ClassVar[type[MultiHeadModel]]
    """Class of the model that the plugin trains."""
    kept: ClassVar[dict[str, Any]] = {"notices": list[str], "noticed": set[str]}
    """Saved attributes with their types; a subclass adds its own."""

    def __init__(self, seed: int, *, fit_head: bool) -> None:
        super().__init__()
        checks.one_of("fit_head", fit_head, Literal[True, False])
        self.seed, self.fit_head = seed, fit_head
        self.notices: list[str] = []  # warnings that wait for the end of a training
        self.noticed: set[str] = set()  # subjects of the warnings already given
        self.unsure: torch.Tensor | None = None
        """Positions of the samples of which the fitted head is not certain; None: all samples."""

    def state(self) -> dict[str, Any]:
        """Return the attributes named in :attr:`kept` as a state to save; masks and heads are saved with the model."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state(self, state: Any) -> None:
        """Restore a state that :meth:`state` returned."""
        self.__dict__.update(zip(self.kept, checked(state, **self.kept), strict=True))

    def model_of(self, strategy: Strategy) -> Any:
        """Return the strategy's model; raise TypeError unless it is of :attr:`model_class`."""
        check_model(strategy.model, self.model_class)
        return strategy.model

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: check the task and store its mask, in a way that can be undone after an error."""
        begin_task_end(strategy)
        self.keep_mask(strategy)
        self._end_task(strategy)
        finish_task(self, strategy)

    def keep_mask(self, strategy: Strategy) -> None:
        """Check the finished task, store its mask or share of weights in the model, and call :meth:`settle_head`."""
        raise NotImplementedError

    def _end_task(self, strategy: Strategy) -> None:
        """Do nothing; a subclass drops the state of the training, so that no trace of an unlearned task remains."""

    def after_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the training: remove finished tasks' parameters from the optimizer, and emit the collected warnings."""
        follow_model(strategy, fresh=False)
        self.unsure = None
        self.warn()

    def warn(self) -> None:
        """Emit the collected warnings, and clear the list."""
        notices, self.notices = self.notices, []
        for text in notices:
            warnings.warn(text, task_faults.MaskWarning, stacklevel=2)

    def notice(self, about: str, text: str | None) -> None:
        """Store a warning, once per subject, until training ends: raised as an error earlier, it would undo a task."""
        if text is not None and about not in self.noticed:
            self.noticed.add(about)
            self.notices.append(text)

    def settle_head(self, strategy: Strategy, task: int) -> None:
        """Fit the head of a finished task again if ``fit_head`` is True."""
        self.unsure = None
        if self.fit_head:
            from avalanche_amnesia.training.head_fit import fit_trained_head  # lazy: plain HAT fits none
            from avalanche_amnesia.unlearning.logistic import FitError

            try:
                self.unsure = fit_trained_head(strategy, task, derive_seed(self.seed, "head", task))
            except FitError as error:
                self.notice("head", f"task {task} keeps the head that it was trained with: {error}")

    def refuse_diverged(self, strategy: Strategy, task: int) -> None:
        """Undo the training and raise TaskError (for NaN samples) or DivergedError if a task's network has diverged."""
        lost = task_faults.divergence_of(self.model_of(strategy), task, strategy.experience)
        if lost is None:
            return
        abort_training(strategy)
        with preserved_rng():  # checked only now: it takes a pass over all samples
            fault = task_faults.fault_of_inputs(task_data(strategy.experience)[0])
        if fault is not None:
            raise TaskError(f"task {task}: {fault}. Its training was undone and the other tasks are as they were")
        advice = "Its training was undone; train it again with a smaller learning rate"
        raise DivergedError(f"task {task} diverged: {lost}. {advice}")


class TaskMaskPlugin(TaskEndPlugin):
    """Base plugin of mask methods: protects entries of earlier tasks, and reverts changes outside the task's mask.

    A subclass calls :meth:`take_snapshot` and sets ``in_training.adjuster`` (:meth:`make_adjuster`) in
    ``before_training_exp``, calls :meth:`restore_protected_entries` in ``after_update``, and :meth:`commit` in
    :meth:`keep_mask`.

    From :meth:`take_snapshot` to the end of the training, heads of other tasks without a mask get no gradient. Heads of
    tasks with a mask are no parameters of the model, so that no optimizer can change them.

    Args:
        rule: how far entries used by remaining tasks may change, and whether updates or gradients are limited.
        seed: every random draw derives from it and the task.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            its experience's samples through its final mask: under a gate that closes, heads are trained too little.

    Attributes:
        training: state of the task in training; None between tasks.
        influences: the tasks that can influence the training of the current task; None: every task that remains.
    """

    commits_to_mask = True
    model_class: ClassVar[type[TaskMaskedModel]]
    """Class of the model that the plugin masks."""
    task_class: ClassVar[type[TaskInTraining]] = TaskInTraining
    """Class of the state of the current task."""
    influences: frozenset[int] | None = None

    def __init__(self, rule: AdjustmentRule, seed: int, *, fit_head: bool = False) -> None:
        super().__init__(seed, fit_head=fit_head)
        self.rule = rule
        self.training: TaskInTraining | None = None

    @property
    def snapshot(self) -> TaskSnapshot | None:
        """Return the copy of model and optimizer from before the current task, to undo it; None between tasks."""
        return None if self.training is None else self.training.snapshot

    @property
    def in_training(self) -> Any:
        """Return the :class:`TaskInTraining` of the current task; raise RuntimeError if no task is in training."""
        if self.training is None:
            raise RuntimeError("no task is in training")
        return self.training

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: undo an interrupted training; raise TaskError if the task was trained already."""
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self.warn()
        self.undo_training(strategy)
        if not model.masked_tasks:
            refuse_incremental(strategy.experience)
        if task in model.masked_tasks:
            raise TaskError(f"{repeat_error(strategy.experience)}; tasks with a mask: {list(model.masked_tasks)}")
        self.training = self.task_class(task)

    def undo_training(self, strategy: Strategy) -> None:
        """Undo an interrupted task: restore weights, delete mask and head. Safe to call again after an interruption."""
        restore_snapshot(strategy)
        model = self.model_of(strategy)
        if self.snapshot is not None:
            self.snapshot.restore(strategy)
        model.drop_current_task()
        task = None if self.training is None else self.training.task
        if task in model.tasks and task not in model.masked_tasks:
            model.remove_task(task)  # the interruption may have come when only the head existed
        self._end_task(strategy)

    def take_snapshot(self, strategy: Strategy) -> None:
        """Copy model and optimizer, to undo the task later; freeze the heads and norms of other unfinished tasks."""
        now: TaskInTraining = self.in_training
        model = self.model_of(strategy)
        now.snapshot = TaskSnapshot(strategy, now.task)
        self.rule.start(self.seed, now.task)
        for other in model.unfinished:  # torch's optimizers skip parameters without a gradient
            model.set_trainable(other, other == now.task)
        now.guards_others = not traits_of(strategy.optimizer).skips_frozen

    @torch.no_grad()
    def _restore_other_tasks(self, model: TaskMaskedModel) -> None:
        """Restore heads and norms of earlier tasks, and parameters without a mask, to their values before the task."""
        now: TaskInTraining = self.in_training
        before = now.before.values
        for name, parameter in model.named_parameters():
            covered = name.removeprefix("backbone.") in now.adjuster.use.covered
            if name in before and not covered and not name.startswith(f"heads.{now.task}."):
                parameter.copy_(before[name])

    def restore_protected_entries(self, model: TaskMaskedModel) -> None:
        """After an optimizer step: undo changes of entries that the adjustment rule protects for earlier tasks."""
        now: TaskInTraining = self.in_training
        now.adjuster.after_step()
        if now.guards_others:  # the optimizer changes parameters without a gradient too
            self._restore_other_tasks(model)

    def task_use(self, model: TaskMaskedModel) -> TaskUse:
        """Return the entries that protected tasks use: tasks in ``rule.locked``, or if it is None all masked tasks."""
        return TaskUse(model, self.rule.locked)

    def make_adjuster(self, model: TaskMaskedModel, use: TaskUse, strategy: Strategy | None = None) -> Adjuster:
        """Return the object that scales or undoes updates of parameter entries that the protected tasks use.

        Args:
            model: the strategy's.
            use: entries that the protected tasks use.
            strategy: passed by a plugin that calls :meth:`begin_step`, to allow scaled gradients, not undone updates.
        """
        return Adjuster(
            self.rule,
            use,
            parameters={n: p for n, p in model.backbone.named_parameters() if n in use.covered},
            before=backbone_entries(self.in_training.before.values),
            layer_of=model.graph.layer_index,
            linear=strategy is not None
            and traits_of(strategy.optimizer).linear
            and sees_final_gradients(strategy, self),
        )

    def begin_step(self, strategy: Strategy, sparsity: LayerSparsity = ()) -> None:
        """After the backward pass: scale gradients, or copy the weights if the adjuster undoes updates after the step.

        Args:
            strategy: at its ``before_update``.
            sparsity: ``κ`` per layer, where the adjuster reads it.
        """
        adjuster: Adjuster = self.in_training.adjuster
        if adjuster.names and adjuster.on_gradients and self.rule.space == "update":
            adjuster.on_gradients = traits_of(strategy.optimizer).linear  # its settings may change within the task
        adjuster.before_step(sparsity)

    def refuse_shared_state(self, strategy: Strategy) -> None:
        """Undo the training and raise ModelError if a forward pass changed tensors that all tasks share."""
        if shared := self.model_of(strategy).shared_state():
            abort_training(strategy)
            raise ModelError(
                f"the backbone's forward changes {shared}, which all tasks would share: its training was undone. "
                "Make them buffers or tensor attributes that have their final shape when the backbone is wrapped (run "
                "it once before); or keep nothing"
            )

    @torch.no_grad()
    def commit(self, strategy: Strategy) -> None:
        """Keep the task's changes inside its mask: restore every entry outside the mask to its value before the task.

        Raises:
            DivergedError: if a weight is not finite, or the features or logits overflow; the training was undone.
            TaskError: if samples are NaN or infinite, or no step was taken; the training was undone.
            ModelError: if forwards changed a tensor that all tasks share; the training was undone.
        """
        self.refuse_shared_state(strategy)
        model, training = self.model_of(strategy), self.in_training
        refuse_untrained(strategy)
        # A warning, no error: fixed weights (lr=0) under a learning mask or head are a method of their own.
        self.notice("unmoved", task_faults.unchanged_warning(training.before.values, model, training.task))
        frozen = training.adjuster.frozen_entries() if self.rule.space == "update" else {}
        keep = {}
        for name, reads in model.entries_of(training.task).items():
            inside = name.removeprefix("backbone.")
            keep[name] = reads & ~frozen[inside] if inside in frozen else reads
        training.before.commit(dict(model.named_parameters()), keep)
        self._restore_other_tasks(model)  # a plugin may have changed them
        training.before.restore_finished_tasks(model)  # once a task only: this takes longer with every finished task
        self.refuse_diverged(strategy, training.task)

    def _end_task(self, strategy: Strategy) -> None:
        if self.training is None:
            return
        model = self.model_of(strategy)
        for task in model.unfinished:  # they were frozen for this training only
            model.set_trainable(task, True)
        self.training = None


def refuse_untrained(strategy: Strategy) -> None:
    """Undo the training and raise TaskError if a task took no optimizer step."""
    if not strategy.clock.train_exp_iterations:
        abort_training(strategy)
        raise TaskError(
            f"task {single_task(strategy.experience)} took no step, and its training was undone: train_epochs is 0, a "
            f"plugin stopped it, or drop_last=True left {len(strategy.experience.dataset)} samples out"
        )
