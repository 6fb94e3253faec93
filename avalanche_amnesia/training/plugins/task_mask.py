"""The life of a task's mask around its training, whatever the mask lies over."""

import warnings
from typing import Any, ClassVar

import torch
from avalanche.core import SupervisedPlugin

from avalanche_amnesia.benchmarks.data import TaskError, refuse_incremental, single_task, why_trained
from avalanche_amnesia.models.multi_head import MultiHeadModel, inside_backbone
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.optimizers import follow_model, traits_of
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.adjuster import Adjuster
from avalanche_amnesia.training.hat_formulas import LayerSparsity
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.host.listening import sees_final_gradients
from avalanche_amnesia.training.host.rollback import abort_training, begin_finishing, finish, go_back, is_last_to_finish
from avalanche_amnesia.training.task_faults import (
    Learned,
    MaskWarning,
    fault_of_task,
    learned,
    near_chance,
    unmoved,
    what_diverged,
)
from avalanche_amnesia.training.task_in_training import TaskInTraining, TaskSnapshot
from avalanche_amnesia.training.update_rules import AdjustmentRule, TaskUse
from avalanche_amnesia.unit_graph.findings import ModelError


class DivergedError(RuntimeError):
    """A task's weights became infinite or NaN, or its features overflow; its training was undone."""


class TaskEndPlugin(SupervisedPlugin):
    """The part that ends a task, whatever the task learned: its head, warnings, the optimizer without the task."""

    repeatable = True
    finishing_step = 1
    model_class: ClassVar[type[MultiHeadModel]]
    """The kind of model that it trains."""
    kept: ClassVar[dict[str, Any]] = {"notices": list[str], "noticed": set[str]}
    """Attributes that outlive a task, with their types; a subclass adds its own."""

    def __init__(self, seed: int, *, fit_head: bool) -> None:
        super().__init__()
        self.seed, self.fit_head = seed, fit_head
        self.notices: list[str] = []  # warnings that wait for the end of a training
        self.noticed: set[str] = set()  # what those were about that were given already
        self.unsure: torch.Tensor | None = None
        """Where samples lie, of the task that ends, of which its fitted head is not sure; None: all may be so."""

    @property
    def place(self) -> str:
        """Text that names the weights of the task in training; empty if all tasks share them."""
        return ""

    def state(self) -> dict[str, Any]:
        """State to save, between tasks: masks and heads are the model's."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state(self, state: Any) -> None:
        """Take back what :meth:`state` returned."""
        self.__dict__.update(zip(self.kept, checked(state, **self.kept), strict=True))

    def model_of(self, strategy: Strategy) -> Any:
        """The strategy's model; a TypeError unless it is of :attr:`model_class`."""
        if not isinstance(strategy.model, self.model_class):  # asked for several times a step
            check_model(strategy.model, self.model_class)
        return strategy.model

    def after_training(self, strategy: Strategy, **kwargs: Any) -> None:
        """Take finished tasks' own parameters out of the optimizer; warn of what was noticed."""
        parameters = dict(strategy.model.named_parameters())
        follow_model(strategy.optimizer, parameters, strategy.optimized_param_id or {}, fresh=False)
        strategy.optimized_param_id = parameters
        self.unsure = None
        self.warn()

    def warn(self) -> None:
        """Give the warnings that wait."""
        notices, self.notices = self.notices, []
        for text in notices:
            warnings.warn(text, MaskWarning, stacklevel=2)

    def notice(self, about: str, text: str | None) -> None:
        """Warn behind the training, once each in a run: where warnings are errors, no task is lost half finished."""
        if text is not None and about not in self.noticed:
            self.noticed.add(about)
            self.notices.append(text)

    def settle_head(self, strategy: Strategy, task: int) -> Learned | None:
        """Fit the head of a finished task, where it is to be, and look how well the task was learned."""
        self.unsure = None
        if self.fit_head:
            from avalanche_amnesia.training.head_fit import fit_trained_head  # lazy: plain HAT fits none
            from avalanche_amnesia.unlearning.logistic import FitError

            try:
                self.unsure = fit_trained_head(strategy, task, derive_seed(self.seed, "head", task))
            except FitError as error:
                self.notice("head", f"task {task} keeps the head that it was trained with: {error}")
        found = learned(strategy.model, strategy, task, derive_seed(self.seed, "accuracy", task))
        if found is not None:
            self.notice("chance", near_chance(found))
        return found

    def refuse_diverged(self, strategy: Strategy, task: int) -> None:
        """Raise, and undo the training, if a task's network is of no use."""
        lost = what_diverged(self.model_of(strategy), task, strategy.experience)
        if lost is None:
            return
        abort_training(strategy)
        fault = fault_of_task(strategy.experience)  # looked for now alone: it takes a pass over all samples
        if fault is not None:
            raise TaskError(f"task {task}: {fault}. Its training was undone and the other tasks are as they were")
        raise DivergedError(
            f"task {task} diverged: {lost}. Its training was undone and the other tasks are as they were; train it "
            "again with a smaller learning rate or gradient clipping"
        )


class TaskMaskPlugin(TaskEndPlugin):
    """Checks a task, guards its training and commits what its mask owns; base of HATPlugin and SubnetPlugin.

    A subclass calls :meth:`take_snapshot` and sets ``in_training.adjuster`` (:meth:`make_adjuster`) in
    ``before_training_exp``, calls :meth:`hold_back` in ``after_update``, and :meth:`commit` in :meth:`keep_mask`.

    From :meth:`take_snapshot` to the end of the training the own parameters (heads) of other tasks without a mask get
    no gradient. Those of tasks with a mask are no parameters of the model: no optimizer meets them.

    Args:
        rule: how far what the remaining tasks use may still move, and where that is enforced.
        seed: every draw derives from it and the task.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            its training samples through its final mask: under a gate that closes, heads are trained too little.

    Attributes:
        training: the task in training; None between tasks.
        influences: the tasks that can leave a trace in the training of the current task; None: every task that remains.
    """

    commits_to_mask = True
    model_class: ClassVar[type[TaskMaskedModel]]
    """The kind of model that it masks."""
    task_class: ClassVar[type[TaskInTraining]] = TaskInTraining
    """Class of what it holds of the task in training."""
    influences: frozenset[int] | None = None

    def __init__(self, rule: AdjustmentRule, seed: int, *, fit_head: bool = False) -> None:
        super().__init__(seed, fit_head=fit_head)
        self.rule = rule
        self.training: TaskInTraining | None = None

    @property
    def snapshot(self) -> TaskSnapshot | None:
        """Values before the task in training; None between tasks."""
        return None if self.training is None else self.training.snapshot

    @property
    def in_training(self) -> Any:
        """The task in training, of :attr:`task_class`; a RuntimeError between tasks."""
        if self.training is None:
            raise RuntimeError("no task is in training")
        return self.training

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Check the experience, and undo a training that was interrupted, before anything else happens."""
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self.warn()
        self.undo_training(strategy)
        if not model.masked_tasks:
            refuse_incremental(strategy.experience)
        if task in model.masked_tasks:
            raise TaskError(f"{why_trained(strategy.experience)}; tasks with a mask: {list(model.masked_tasks)}")
        self.training = self.task_class(task)

    def undo_training(self, strategy: Strategy) -> None:
        """Undo a task whose training was interrupted: weights, mask, head. May itself be interrupted, and repeated."""
        go_back(strategy)
        model = self.model_of(strategy)
        if self.snapshot is not None:
            self.snapshot.restore(model, strategy.optimizer)
        model.drop_current_task()
        task = None if self.training is None else self.training.task
        if task in model.tasks and task not in model.masked_tasks:
            model.remove_task(task)  # it may have got no further than its head
        self._end_task(strategy)

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Keep the task's mask, and return what it does not own; until the task is finished there is a way back."""
        begin_finishing(strategy)
        self.keep_mask(strategy)
        self._end_task(strategy)
        if is_last_to_finish(self, strategy):  # else others have yet to record it
            finish(strategy)

    def keep_mask(self, strategy: Strategy) -> None:
        """Commit what the mask of the task in training owns, and let the model keep the mask (its ``finish_task``).

        Then :meth:`settle_head`.
        """
        raise NotImplementedError

    def take_snapshot(self, strategy: Strategy) -> None:
        """Remember the values before the task, and let it train no other task's own modules."""
        now: TaskInTraining = self.in_training
        model = self.model_of(strategy)
        now.snapshot = TaskSnapshot(model, now.task, strategy.optimizer)
        self.rule.start(self.seed, now.task)
        for other in model.unfinished:  # torch's optimizers skip what has no gradient, whatever decay or momentum
            model.set_trainable(other, other == now.task)
        now.guards_others = not traits_of(strategy.optimizer).skips_frozen

    @torch.no_grad()
    def _put_others_back(self, model: TaskMaskedModel) -> None:
        """Give others' heads and norms, and what no mask covers (norms to begin with), their bits before the task."""
        now: TaskInTraining = self.in_training
        before = now.before.values
        own = tuple(f"{container}.{now.task}." for container in model.task_containers)
        for name, parameter in model.named_parameters():
            covered = name.removeprefix("backbone.") in now.adjuster.use.covered
            if name in before and not covered and not name.startswith(own):
                parameter.copy_(before[name])

    def hold_back(self, model: TaskMaskedModel) -> None:
        """Take back, right behind the optimizer's step, whatever it moved and must not."""
        now: TaskInTraining = self.in_training
        now.adjuster.after_step()
        if now.guards_others:  # it moves parameters without a gradient too
            self._put_others_back(model)

    def task_use(self, model: TaskMaskedModel) -> TaskUse:
        """Use that a next task would meet: of the locked tasks, or of all that remain."""
        return TaskUse(model, self.rule.locked)

    def make_adjuster(self, model: TaskMaskedModel, use: TaskUse, strategy: Strategy | None = None) -> Adjuster:
        """Adjuster that holds back the updates of everything that the protected tasks use.

        Args:
            model: the strategy's.
            use: what the protected tasks use.
            strategy: for a plugin that calls :meth:`begin_step`, if it may do so by way of gradients.
        """
        return Adjuster(
            self.rule,
            use,
            parameters={n: p for n, p in model.backbone.named_parameters() if n in use.covered},
            before=inside_backbone(self.in_training.before.values),
            layer_of=model.graph.layer_of,
            zero_rests=strategy is not None and _starts_at_rest(strategy, self),
            linear=strategy is not None and traits_of(strategy.optimizer).linear,
        )

    def begin_step(self, strategy: Strategy, sparsity: LayerSparsity = ()) -> None:
        """Prepare, behind the backward pass and in front of the optimizer's step, what :meth:`hold_back` ends.

        Args:
            strategy: at its ``before_update``.
            sparsity: ``κ`` per layer, where the adjuster reads it.
        """
        adjuster: Adjuster = self.in_training.adjuster
        if adjuster.names and adjuster.on_gradients and self.rule.space == "update":
            traits = traits_of(strategy.optimizer)  # its settings may change within the task
            adjuster.on_gradients = traits.zero_rests if adjuster.frozen else traits.linear
        adjuster.before_step(sparsity)

    def refuse_shared_state(self, strategy: Strategy) -> None:
        """Raise a ModelError, and undo the training, if forwards changed what no task has of its own."""
        shared = self.model_of(strategy).shared_state()
        if shared:
            abort_training(strategy)
            raise ModelError(
                f"the backbone's forward changes {shared}, or began to keep them: all tasks would share that, and no "
                "unlearning could take it apart. The task's training was undone. Make them buffers, or tensor "
                "attributes, that have their final shape when the backbone is wrapped (run it once before, where it "
                "fills a cache): then every task has its own. Or keep nothing"
            )

    @torch.no_grad()
    def commit(self, strategy: Strategy) -> None:
        """Return every entry outside the task's mask to its bits before the task.

        Raises:
            DivergedError: if a weight is not finite, or the features or logits overflow; the training was undone.
            TaskError: the same, where samples that are NaN or infinite are to blame, or no step was taken.
            ModelError: if forwards changed a tensor that all tasks share; the training was undone.
        """
        self.refuse_shared_state(strategy)
        model, training = self.model_of(strategy), self.in_training
        refuse_untrained(strategy)
        # A warning, no error: weights that are meant to stay (lr=0) under a mask or a head that learns are a method.
        self.notice("unmoved", unmoved(training.before.values, model, training.task))
        adjuster = training.adjuster
        frozen = adjuster.frozen_entries() if self.rule.space == "update" else {}
        keep = {}
        for name, reads in model.entries_of(training.task):
            inside = name.removeprefix("backbone.")
            keep[name] = reads & ~frozen[inside] if inside in frozen else reads
        training.before.commit(dict(model.named_parameters()), keep)
        self._put_others_back(model)  # whoever wrote there: a plugin may
        training.before.put_finished_back(model)  # once a task only: this takes longer with every finished task
        self.refuse_diverged(strategy, training.task)

    def _end_task(self, strategy: Strategy) -> None:
        """Keep nothing of a task beyond its training: what is left here would outlive its unlearning."""
        if self.training is None:
            return
        model = self.model_of(strategy)
        for task in model.unfinished:  # they were frozen for this training only
            model.set_trainable(task, True)
        self.training = None


def _starts_at_rest(strategy: Strategy, plugin: SupervisedPlugin) -> bool:
    """Tell whether what a plugin takes out of gradients has the same effect, to the bit, as if it were never made."""
    traits = traits_of(strategy.optimizer)
    rests = traits.linear or (traits.zero_rests and not any(strategy.optimizer.state.values()))
    return rests and sees_final_gradients(strategy, plugin)


def refuse_untrained(strategy: Strategy) -> None:
    """Raise, and undo the training, if a task that ends took no step."""
    if not strategy.clock.train_exp_iterations:
        abort_training(strategy)
        raise TaskError(
            f"task {single_task(strategy.experience)} took no step, and its training was undone: a mini-batch is "
            f"{strategy.train_mb_size} of its {len(strategy.experience.dataset)} samples, with drop_last=True none if "
            "these are fewer; or train_epochs is 0, or a plugin stopped the training"
        )
