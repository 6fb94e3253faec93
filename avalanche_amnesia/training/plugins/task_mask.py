"""The life of a task's mask around its training, whatever the mask lies over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar

from avalanche.core import SupervisedPlugin
from torch import Tensor

from avalanche_amnesia.models import TaskMaskedModel
from avalanche_amnesia.training.adjustment import Adjuster, AdjustmentRule, AdjustSpace, TaskUse
from avalanche_amnesia.training.divergence import what_diverged
from avalanche_amnesia.training.samples import fault_of_task
from avalanche_amnesia.training.snapshot import TaskSnapshot


class TaskError(ValueError):
    """An experience can't be trained as a task of its own; nothing changed."""


class DivergedError(RuntimeError):
    """A task's weights became infinite or NaN, or its features overflow; its training was undone."""


class TaskMaskPlugin(SupervisedPlugin):
    """Checks a task, guards its training and commits what its mask owns; base of HATPlugin and SubnetPlugin.

    Args:
        rule: how far what the remaining tasks use may still move.
        adjust: where that is enforced.
        seed: every draw derives from it and the task.

    Attributes:
        snapshot: values before the task in training; None between tasks.
        saw: the tasks that can leave a trace in the training of the current task, because it reads their units or
            is damped by them; None: every task that remains.
        opened_whole: task → layers of which it opened all units that it could: such a mask says nothing of the task.
    """

    model_class: ClassVar[type[TaskMaskedModel]]
    """The kind of model that it masks."""
    within_a_task: ClassVar[frozenset[str]] = frozenset({"_adjuster"})
    """Attributes that must not outlive a task's training."""

    def __init__(self, rule: AdjustmentRule, adjust: AdjustSpace, seed: int) -> None:
        super().__init__()
        self.rule, self.adjust, self.seed = rule, adjust, seed
        self.snapshot: TaskSnapshot | None = None
        self._starting: int | None = None
        self.saw: frozenset[int] | None = None
        self.opened_whole: dict[int, frozenset[str]] = {}

    def model_of(self, strategy: Any) -> Any:
        """The strategy's model.

        Raises:
            TypeError: unless it is of :attr:`model_class`.
        """
        if not isinstance(strategy.model, self.model_class):
            name = self.model_class.__name__
            raise TypeError(
                f"{type(self).__name__} masks a {name}, got {type(strategy.model).__name__}: wrap the feature "
                f"extractor, {name}(backbone)"
            )
        return strategy.model

    def before_train_dataset_adaptation(self, strategy: Any, **kwargs: Any) -> None:
        """Check the experience, and undo a training that was interrupted, before anything else happens."""
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self.abort(strategy)
        if task in model.masks:
            raise TaskError(
                f"task {task} is already trained; tasks with a mask: {list(model.masks)}. Unlearn it first, or give "
                "the new data a task label of its own"
            )
        self._starting = task

    def abort(self, strategy: Any) -> None:
        """Undo a task whose training was interrupted: weights, mask, head."""
        model = self.model_of(strategy)
        if self.snapshot is not None:
            self.snapshot.restore(model)
            model.drop_current_task()
            self.snapshot = None
        elif self._starting in model.tasks and self._starting not in model.masks:
            model.remove_task(self._starting)  # it got as far as its head
        self._end_task(model)

    # Where masks move units ----------------------------------------------------------------------------------

    def at_rest(self, strategy: Any) -> AbstractContextManager[None]:
        """In the middle of a training: everything as it lies between trainings, for the length of a block."""
        return nullcontext()

    def rearrange(self, strategy: Any, undo: ExitStack) -> None:
        """Follow the loss of tasks that were just taken out of the model, at rest; ``undo`` receives the way back."""

    def moved_without(self, strategy: Any, tasks: Sequence[int]) -> tuple[int, ...]:
        """The remaining tasks whose units would move if some tasks were taken out, in training order."""
        return ()

    def _take_snapshot(self, model: TaskMaskedModel, task: int) -> None:
        """Remember the values before the task, and let it train no other task's own modules."""
        self.snapshot = TaskSnapshot(model, task)
        self.rule.start(self.seed, task)
        for other in model.tasks:  # an optimizer skips what has no gradient, whatever its decay or momentum
            model.let_learn(other, other == task)

    def task_use(self, model: TaskMaskedModel) -> TaskUse:
        """What the tasks use that are to be protected."""
        return TaskUse(model)

    def _make_adjuster(self, model: TaskMaskedModel, use: TaskUse) -> Adjuster:
        """What holds back the updates of everything that the protected tasks use."""
        assert self.snapshot is not None
        return Adjuster(
            self.rule,
            self.adjust,
            use,
            parameters={n: p for n, p in model.backbone.named_parameters() if n in use.covered},
            before={
                name.removeprefix("backbone."): value
                for name, value in self.snapshot.values.items()
                if name.startswith("backbone.")
            },
            layer_of=model.graph.layer_of,
        )

    def _commit(self, strategy: Any, owned: Mapping[str, Tensor], adjuster: Adjuster) -> None:
        """Return every entry outside the task's mask to its bits before the task.

        Args:
            strategy: whose task's training is over.
            owned: parameter name in the backbone → positive where the task's mask covers it; broadcasts.
            adjuster: of the task.

        Raises:
            DivergedError: if a weight is not finite, or the features or logits overflow; the training was undone.
            TaskError: the same, where samples that are NaN or infinite are to blame.
        """
        model = self.model_of(strategy)
        assert self.snapshot is not None
        frozen = adjuster.frozen_entries() if self.adjust == "update" else {}
        keep = {}
        for name, use in owned.items():
            mine = (use > 0).expand_as(adjuster.use.covered[name])
            keep[f"backbone.{name}"] = mine & ~frozen[name] if name in frozen else mine
        self.snapshot.commit(dict(model.named_parameters()), keep)
        task = self.snapshot.task
        lost = what_diverged(model, task, strategy.experience)
        if lost is not None:
            self._give_up(strategy)
            fault = fault_of_task(strategy.experience)  # looked for now alone: it takes a pass over all samples
            if fault is not None:
                raise TaskError(f"task {task}: {fault}. Its training was undone and the other tasks are as they were")
            raise DivergedError(
                f"task {task} diverged: {lost}. Its training was undone and the other tasks are as they were; train it "
                "again with a smaller learning rate or gradient clipping"
            )

    def _give_up(self, strategy: Any) -> None:
        """Undo the task in training, here and in every plugin that knows of it."""
        for plugin in strategy.plugins:
            if plugin is not self and hasattr(plugin, "abort"):
                plugin.abort(strategy)
        self.abort(strategy)

    def _end_task(self, model: TaskMaskedModel) -> None:
        """Keep nothing of a task beyond its training: what is left here would outlive its unlearning."""
        self.snapshot, self._starting = None, None
        for name in self.within_a_task & vars(self).keys():
            delattr(self, name)
        for task in model.tasks:  # they were frozen for this training alone
            model.let_learn(task, True)


def single_task(experience: Any) -> int:
    """The one task label of an experience.

    Raises:
        TaskError: if it has none, or several.
    """
    labels = list(getattr(experience, "task_labels", []))
    if len(labels) != 1:
        raise TaskError(
            f"an experience must hold exactly one task, got task labels {labels}; build the stream with "
            "avalanche_amnesia.benchmarks or avalanche's task_incremental_benchmark"
        )
    return int(labels[0])
