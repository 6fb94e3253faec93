"""Plugin that records every task's update (change of the parameters), for any Avalanche strategy."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.benchmarks.data import repeat_error, single_task
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.substitutes import hash_tensors
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training.host.lookup import find_plugin, refuse_second
from avalanche_amnesia.training.host.rollback import begin_task_end, finish_task, restore_snapshot
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin, refuse_untrained
from avalanche_amnesia.training.task_in_training import TaskInTraining, TaskSnapshot
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unlearning.context import own_parameters, remove_task_modules
from avalanche_amnesia.unlearning.purging import own_attributes, purger_of


class TrajectoryPlugin(Plugin):
    """Plugin that records every task's update of the parameters in a :class:`~avalanche_amnesia.trajectory.Trajectory`.

    Works with the masked strategies (where an update is sparse, because entries outside the mask are restored) and with
    stock ones (where it is dense). An interrupted training is undone before the next one.

    With ``dtype``, weights are rounded when the task ends, before they are used: this costs the task a little accuracy,
    and unlearning nothing (``trajectory.report()`` has the rounding errors). Put this plugin in front of those that
    read the model when a task ends (EWC, LwF).

    Args:
        dtype: store updates as ``torch.float32``, ``float16``, ``bfloat16`` or ``int8`` if that is smaller, and round
            the weights in the same way; None: lossless.

    Attributes:
        trajectory: the store.
        training: state of the task in training, shared with a masking plugin; None between tasks.
        shared_state: names of buffers and attributes of modules that trainings changed for all tasks together. No
            unlearning can separate them: plans name them.

    Raises:
        ValueError: for an option that is not allowed; before a training, if it precedes a plugin that masks.
        ModelError: before a training, if the model keeps running statistics that all tasks share (BatchNorm): they
            can't be separated again.
    """

    finishing_step = 2

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.trajectory = Trajectory(dtype=dtype)
        self.dtype = dtype
        self.training: TaskInTraining | None = None
        self._new: int | None = None
        self._earlier: Any = None  # the task's head without the part in training
        self.shared_state: frozenset[str] = frozenset()
        self._state_before: dict[str, str] = {}

    def state(self) -> dict[str, Any]:
        """Return the trajectory (recorded updates) and the names of shared tensors, as a state to save."""
        return {"trajectory": self.trajectory.state(), "shared_state": self.shared_state}

    def load_state(self, state: Any) -> None:
        """Restore a state that :meth:`state` returned."""
        trajectory, shared_state = checked(state, trajectory=dict, shared_state=frozenset[str])
        self.trajectory.load_state(trajectory)
        self.shared_state = shared_state

    @property
    def snapshot(self) -> TaskSnapshot | None:
        """Return the copy of model and optimizer from before the current task, to undo it; None between tasks."""
        return None if self.training is None else self.training.snapshot

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: undo an interrupted training; check task, model and plugin order."""
        refuse_second(strategy, TrajectoryPlugin)
        task, masking = single_task(strategy.experience), find_plugin(strategy, TaskMaskPlugin)
        if masking is not None and strategy.plugins.index(masking) > strategy.plugins.index(self):
            raise ValueError(f"put {type(masking).__name__} before TrajectoryPlugin, which records committed tasks")
        self.undo_training(strategy)
        if task in self.trajectory.tasks and not getattr(strategy.model, "additive", False):
            raise RequestError(f"{repeat_error(strategy.experience)}; recorded tasks: {list(self.trajectory.tasks)}")
        if shared := _shared_statistics(strategy.model):
            raise ModelError(
                f"modules {shared} keep running statistics that all tasks share, and unlearning can't take apart: use "
                "track_running_stats=False, or a TaskNormModel or MaskedModel, where each task has its own"
            )

    def after_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before the model adds a task's modules: note if the task has any already; an undo keeps them."""
        task = single_task(strategy.experience)
        self._earlier = strategy.model.heads.get(task) if getattr(strategy.model, "additive", False) else None
        self._new = None if own_parameters(strategy.model, task) else task  # last: an interruption may come in between

    @torch.no_grad()
    def undo_training(self, strategy: Strategy) -> None:
        """Undo an interrupted training: delete the modules that the training added, and restore the snapshot."""
        restore_snapshot(strategy)
        if self._new is not None and self._earlier is not None:
            strategy.model.store_task(self._new, self._earlier)
            strategy.model.heads.finish(self._new)
        elif self._new is not None:  # first, because a training may change the shapes of its task's own tensors
            with Transaction() as change:
                remove_task_modules(strategy.model, self._new, change)
                change.commit()
        if self.snapshot is not None:
            self.snapshot.restore(strategy)
        self.training, self._new, self._earlier = None, None, None

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's first step: copy the model, or use a masking plugin's copy, to undo the training later."""
        masking = find_plugin(strategy, TaskMaskPlugin)
        if masking is None:
            self.training = TaskInTraining(single_task(strategy.experience))
            self.training.snapshot = TaskSnapshot(strategy, self.training.task)
        else:
            self.training = masking.training  # one copy of the model serves both
        self._state_before = _shared_state(strategy.model)

    def memory_of(self, strategy: Strategy) -> dict[str, Any]:
        """Return the strategy's own attributes for a snapshot, if it stores samples (as Avalanche's DER), else {}."""
        return own_attributes(strategy) if purger_of(strategy) is not None else {}

    def before_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before an epoch: drop the snapshot from the last epoch's end, because an unlearning may change the model."""
        if purger_of(strategy) is not None:
            strategy.rollback_point = None

    def after_training_epoch(self, strategy: Strategy, **kwargs: Any) -> None:
        """After an epoch: if the strategy has its own replay memory (DER), take a snapshot before samples enter it."""
        if purger_of(strategy) is not None:
            begin_task_end(strategy)

    def prune(self, before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Do nothing; a subclass may set entries of ``parameters`` back to ``before``, to make the update smaller."""

    @torch.no_grad()
    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: record its change of shared parameters; ``dtype`` rounds it, in the model too."""
        begin_task_end(strategy)
        if self.training is None:
            raise RuntimeError("no task is in training")
        refuse_untrained(strategy)
        model, task, values = strategy.model, self.training.task, self.training.before.values
        own = own_parameters(model, task)
        before = {name: value for name, value in values.items() if name not in own}
        parameters = dict(model.named_parameters())
        finished = model.masked_tasks if isinstance(model, TaskMaskedModel) else ()  # their heads aren't parameters
        others = own_parameters(model, *set(self.trajectory.tasks).difference(finished))
        movable = [p for name, p in parameters.items() if name in before and name not in others and p.requires_grad]
        self.prune(before, parameters)
        count = sum(parameter.numel() for parameter in movable)
        committed = self.trajectory.record(task, before, parameters, parameters=count)
        for name, value in committed.items():
            parameters[name].copy_(value)
        state = _shared_state(model)
        self.shared_state |= {name for name, digest in state.items() if self._state_before.get(name) != digest}
        if getattr(model, "additive", False):
            model.heads.finish(task)
        self.training, self._new, self._earlier = None, None, None
        finish_task(self, strategy)


def _shared_statistics(model: nn.Module) -> list[str]:
    """Return the names of the modules whose running statistics all tasks share."""
    if isinstance(model, MultiHeadModel) and (model.features_per_task or model.state_per_task):
        return []  # no training runs the backbone's norms: each task has copies of its own, or they are frozen
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    ]


def _shared_state(model: nn.Module) -> dict[str, str]:
    """Return the hash of every buffer and module attribute that all tasks share, by name."""
    if isinstance(model, MultiHeadModel) and model.state_per_task:
        return {}  # each task has copies of all state that changes, or it is refused
    own = model.buffer_names(model.tasks) if isinstance(model, MultiHeadModel) else ()
    return {name: digest for name, digest in hash_tensors(model).items() if name not in own}
