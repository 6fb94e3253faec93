"""Plugin that trains each task on its own share of the weights, and keeps all other weights fixed."""

from collections.abc import Sequence
from typing import Any

import torch
from avalanche.training.plugins import AGEMPlugin, EWCPlugin, GEMPlugin, MASPlugin
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, repeat_error, single_task
from avalanche_amnesia.isolation.pools import Pools
from avalanche_amnesia.models.disjoint import Allocation, DisjointModel
from avalanche_amnesia.optimizers import traits_of
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.host.rollback import abort_training
from avalanche_amnesia.training.plugins.task_mask import TaskEndPlugin, refuse_untrained
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.task_faults import unchanged_warning
from avalanche_amnesia.unit_graph.findings import ModelError

_PROTECTING = (EWCPlugin, MASPlugin, GEMPlugin, AGEMPlugin)


class DisjointPlugin(TaskEndPlugin):
    """Plugin that assigns a task its share of the weights, keeps all other weights fixed, and stores only the share.

    Works with any Avalanche strategy whose model is a :class:`~avalanche_amnesia.models.DisjointModel`. While a task
    trains, its network contains only weights that it reads, so that no forward pass needs a mask. Gradients outside the
    share become 0 after the backward pass, before plugins clip. If the optimizer may still change such an entry (by
    weight decay, or in steps that mix entries), the entry is restored after the step.

    Args:
        isolation: how many shares exist, and which task gets which; by default one for each task of the stream.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            all samples of its experience, whatever loss and sampler the training has.
        seed: the partition derives from it.

    Raises:
        CapacityError: before a training, if another task has the task's share; nothing changed.
        TaskError: before a training, for a task that has a share already, or with a plugin that needs gradients of
            earlier tasks' weights (EWC, MAS, GEM, A-GEM).
        DivergedError: if a weight is not finite when a task ends; its training was undone.
        ModelError: if forwards store tensors that can't be copied per task; its training was undone.
    """

    model_class = DisjointModel
    trains_again = True

    def __init__(self, isolation: Pools | None = None, *, fit_head: bool = True, seed: int = 0) -> None:
        super().__init__(checks.whole_number("seed", seed, None), fit_head=fit_head)
        self.isolation = checks.object_of("isolation", isolation, Pools, "Pools.planned(benchmark)")
        self._share: Allocation | None = None
        self._fixed: _FixedEntries | None = None

    @property
    def place(self) -> str:
        """Return a text that identifies the current task's share of the weights; empty between tasks."""
        return "" if self._share is None else repr(self._share)

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a training: raise TaskError if the task was trained already, or a plugin is EWC, MAS, GEM or A-GEM."""
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self.warn()
        refused = [type(plugin).__name__ for plugin in strategy.plugins if isinstance(plugin, _PROTECTING)]
        if refused:
            raise TaskError(
                f"{refused[0]} asks for gradients of earlier tasks' weights, which have none here: no training changes "
                f"them. Leave {refused[0]} out of plugins"
            )
        if task in model.tasks and task not in model.heads.unfinished:
            raise TaskError(f"{repeat_error(strategy.experience)}; tasks with a share: {list(model.tasks)}")

    def after_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Choose the task's share of the weights, after due unlearnings and undone trainings have freed shares."""
        model, task = self.model_of(strategy), single_task(strategy.experience)
        self._share = self.isolation.share(strategy, model, task, self.seed)  # raises if no share is free

    def before_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: assign the task its share of the network, and fix all entries outside the share."""
        model, task = self.model_of(strategy), single_task(strategy.experience)
        assert self._share is not None
        owned = model.deal(task, self._share)
        network = dict(model.network(task).named_parameters())
        moves = not traits_of(strategy.optimizer).skips_frozen
        self._fixed = _FixedEntries(
            {network[name]: mine for name, mine in owned.items()},
            list(model.backbone.parameters()) if moves else [],
            reads=bool(self._share.reads),
        )

    def trained_entries(self) -> dict[int, Tensor]:
        """Return a mask of the trained entries of each parameter, by its ``id()``; processes exchange only these."""
        fixed = self._fixed
        return {} if fixed is None else {id(p): own for p, own in zip(fixed.parameters, fixed.own, strict=True)}

    @torch.no_grad()
    def after_backward(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the backward pass: set the gradients outside the task's share to 0."""
        if self._fixed is not None:
            self._fixed.clear_gradients()

    @torch.no_grad()
    def after_update(self, strategy: Strategy, **kwargs: Any) -> None:
        """After the optimizer's step: restore entries outside the task's share that the optimizer moved."""
        if self._fixed is not None:
            self._fixed.restore(strategy)

    def undo_training(self, strategy: Strategy) -> None:
        """Drop the training state of the current task, because its training is undone."""
        self._share = self._fixed = None

    _end_task = undo_training

    def keep_mask(self, strategy: Strategy) -> None:
        """At a task's end: check the task, store its share of the weights (its mask) in the model, and fit its head."""
        refuse_untrained(strategy)
        model, task = self.model_of(strategy), single_task(strategy.experience)
        recorder = find_plugin(strategy, TrajectoryPlugin)
        before = None if recorder is None else recorder.snapshot
        if before is not None:
            self.notice("unmoved", unchanged_warning(before.values, model, task))
        self.refuse_diverged(strategy, task)
        try:
            model.finish_task(task)
        except ModelError:
            abort_training(strategy)
            raise
        self.settle_head(strategy, task)


class _FixedEntries:
    """Entries outside the task's share, and the methods that keep them fixed during its training."""

    # ``owned``: entries of the task's partition, by parameter. ``backbone``: parameters that the task has copies of, if
    # the optimizer also moves parameters without a gradient.
    def __init__(
        self, owned: dict[torch.nn.Parameter, Tensor], backbone: Sequence[torch.nn.Parameter], *, reads: bool
    ) -> None:
        self.parameters = list(owned)
        self._backbone = [(parameter, parameter.detach().clone()) for parameter in backbone]
        # As numbers: multiplying by them takes a thirtieth of the time of a masked fill.
        self.own = [mine.to(parameter.dtype) for parameter, mine in owned.items()]
        self._read = [torch.where(mine, 0, parameter.detach()) for parameter, mine in owned.items()] if reads else []

    def clear_gradients(self) -> None:
        """Set the gradients of entries outside the task's share to 0."""
        pairs = [(p.grad, own) for p, own in zip(self.parameters, self.own, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_mul_(*map(list, zip(*pairs, strict=True)))

    def restore(self, strategy: Strategy) -> None:
        """Restore entries outside the task's share, if the optimizer can change entries whose gradient is always 0."""
        for parameter, value in self._backbone:
            parameter.copy_(value)
        traits = traits_of(strategy.optimizer)
        # If each entry is changed by its own gradient only, an entry of 0 without a gradient stays 0 under any decay.
        if traits.entrywise and traits.skips_frozen and (traits.zero_rests or not self._read):
            return
        parameters = [parameter.data for parameter in self.parameters]
        torch._foreach_mul_(parameters, self.own)
        torch._foreach_add_(parameters, self._read or 0.0)  # +0: negative values are -0 by now
