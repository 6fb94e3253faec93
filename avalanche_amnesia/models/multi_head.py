"""Multi-head model (one backbone, a head per task), the base of all masked models; and functions for task labels."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from avalanche.models import MultiTaskModule
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.models.random_features import ridge_scores
from avalanche_amnesia.models.task_store import TaskModules, TaskStore, register_all
from avalanche_amnesia.unit_graph.backbones import (
    HEADS_OF_ITS_OWN,
    check_backbone,
    first_float,
    run_backbone,
    try_input_shapes,
)
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.task_owned import OwnModules

# Logit of classes unknown to a sample's task, in batches that mix tasks with different numbers of classes.
NO_CLASS = -1000.0
_BACKBONE = "backbone."
_KNOWN = "known_label"
_RIDGE = "ridge"
_OF_TASK = re.compile(r"heads\.(\d+)\.(.+)")
Value = TypeVar("Value")


class UnknownTaskError(KeyError):
    """Error: the requested task has no head (or mask), because it was never trained, or was unlearned."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoHead(nn.Module):
    """Replacement for the head of an untrained or unlearned task: returns equal logits (zeros) for all classes."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.out_features = n_classes

    def forward(self, features: Tensor) -> Tensor:
        """Return zeros ``(batch, classes)`` for features ``(batch, features)``."""
        return features.new_zeros(len(features), self.out_features)


class MultiHeadModel(MultiTaskModule):
    """Multi-head model: a feature extractor shared by all tasks, and one linear head per task.

    Other modules of a task (norms, a network) are inside its head, as ``heads.<task>.own``. So one module contains
    everything that belongs only to a task.

    Unlike Avalanche's multi-head classifier, it creates no head during evaluation, so an evaluation never changes
    later training; and heads can be removed. If an Avalanche strategy evaluates a task without a head, all its classes
    get equal logits.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``.
        n_features: width of the features; by default ``backbone.features`` if it is an integer, else the width found by
            running the backbone, without values, on inputs of likely shapes.

    Raises:
        ModelError: if the width of the features is unknown, or the module can't be used as a backbone.
        TypeError: if the backbone is no module.
    """

    features_per_task = False
    """True if features depend on the task, through its norms, mask or network."""
    state_per_task = False
    """True if each task has its own copy of all state except parameters (running statistics, buffers)."""
    isolates: bool = False
    """True if a task's training neither uses nor changes weights of other tasks that may be unlearned."""
    additive = False
    """True if a task's state is a sum over samples: samples can be added later, or unlearned by subtraction."""
    trains_again = False
    """True if any strategy can train an earlier task again in its old position, after later tasks were trained."""

    _biased_heads = True
    _head_entry = "weight"  # a tensor of every task's head

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__()
        check_backbone(backbone)
        if isinstance(backbone, MultiTaskModule):
            raise ModelError(f"the backbone is a {type(backbone).__name__}{HEADS_OF_ITS_OWN}")
        width = checks.integer(getattr(backbone, "features", None) if n_features is None else n_features)
        mixed = len({p.dtype for p in backbone.parameters() if p.is_floating_point()}) > 1
        tried = try_input_shapes(backbone) if mixed or (width is None and n_features is None) else None
        if width is None and tried is not None:
            width = tried.shape[1]
        if width is None or width < 1:
            given = "" if n_features is None else f", not {n_features!r}"
            raise ModelError(f"give n_features=, the width of what {type(backbone).__name__} returns: 64{given}")
        self.backbone = backbone
        self.n_features: int = width
        self._head_dtype = None if tried is None or not mixed else tried.dtype
        self.heads = TaskModules()
        self._evaluated_untrained: dict[int, int] = {}

    def begins_as(self, name: str) -> str:
        """Return the name of the parameter that initialises a task's parameter ``name``, or ``name`` if none does."""
        return name

    def free_share(self) -> float | None:
        """Return the fraction of the weights that no task owns, in [0, 1]; None if tasks do not own weights."""
        return None

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def _task_stores(self) -> list[TaskStore]:
        return [module for module in self.children() if isinstance(module, TaskStore)]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Return the labels of the tasks with a head, in the order of the heads' creation."""
        return self.heads.tasks

    def adaptation(self, experience: Any) -> None:
        """Create heads for an experience's new tasks; freeze running statistics of tasks outside the experience.

        In evaluation mode, only record the new tasks' numbers of classes.
        """
        if not hasattr(experience, "task_labels"):
            raise UnknownTaskError(
                "an experience has no task labels: use task_incremental_benchmark(benchmark, reset_task_labels=True)"
            )
        for task in experience.task_labels:
            if task not in self.heads:
                if self.training:
                    self.add_head(int(task), n_classes(experience))
                else:
                    self._evaluated_untrained[int(task)] = n_classes(experience)
        for task in self.heads.unfinished if self.training else ():
            parts = self.task_parts(task)
            if isinstance(parts, OwnModules):
                parts.learn(task in experience.task_labels, True)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model like ``nn.Module.to``; return at once if all tensors are already on the device."""
        if len(args) == 1 and isinstance(args[0], (str, torch.device)) and not kwargs:
            device = torch.device(args[0])
            if all(tensor.device == device for tensor in (*self.parameters(), *self.buffers())):
                return self
        return super().to(*args, **kwargs)

    def add_head(self, task: int, n_classes: int) -> None:
        """Create and store a task's random head ``features → n_classes``, and its other modules, e.g. norms."""
        self.store_task(task, with_parts(self.new_head(n_classes), self.fresh_parts()))

    def store_task(self, task: int, head: nn.Module) -> None:
        """Store a task's head; norms or a network of the task, if any, are submodules of ``head``."""
        self.heads[task] = head.train(self.training)
        self.known_train_tasks_labels.add(task)

    def fresh_parts(self) -> nn.Module | None:
        """Return a new task's copies of backbone modules (e.g. norms), or None if tasks have nothing but a head."""
        return None

    def parts_for(self, saved: Mapping[str, Tensor]) -> nn.Module | None:
        """Return a task's modules except the head, so that the tensors in ``saved`` can be loaded into them."""
        return self.fresh_parts()

    def task_parts(self, task: int) -> Any:
        """Return what ``task`` has besides its head, e.g. its own norms or network; None if it has only a head."""
        return getattr(self.heads.get(task), "own", None)

    def new_head(self, n_classes: int) -> nn.Module:
        """Return a new, randomly initialised head, without registering it in the model."""
        like = first_float(self.backbone)
        dtype = self._head_dtype or like.dtype
        return nn.Linear(self.n_features, n_classes, self._biased_heads, device=like.device, dtype=dtype)

    def head_parameters(self) -> list[nn.Parameter]:
        """Return parameters of a new head, e.g. for their shapes, without registering the head in the model."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            return list(self.new_head(1).parameters())

    def remove_task(self, task: int) -> None:
        """Remove all modules and tensors that belong only to ``task``."""
        for store in self._task_stores:
            store.drop(task)
        self.known_train_tasks_labels.discard(task)

    def buffer_names(self, tasks: Sequence[int]) -> list[str]:
        """Return the ``state_dict`` names of the buffers in the heads and other modules of ``tasks``."""
        present = [task for task in tasks if task in self.heads]
        return [f"heads.{task}.{name}" for task in present for name, _ in self.heads[task].named_buffers()]

    def task_state(self) -> Any:
        """Return all per-task modules and tensors for :meth:`restore_task_state`, as references, not copies."""
        return [store.state() for store in self._task_stores], set(self.known_train_tasks_labels)

    def restore_task_state(self, state: Any) -> None:
        """Restore the per-task modules and tensors that :meth:`task_state` returned."""
        states, known = state
        for store, held in zip(self._task_stores, states, strict=True):
            store.restore(held)
        self.known_train_tasks_labels = set(known)

    def tasks_read(self, task: int) -> Sequence[int]:
        """Return the other tasks whose parameters the network of the finished ``task`` uses; by default none."""
        return ()

    @torch.no_grad()
    def close_classes(self, task: int, classes: Sequence[int]) -> None:
        """Stop the head of ``task`` from predicting ``classes``: set their weights to 0 and their bias to -1000.

        Raises:
            ModelError: if the task has no head, or its head has no bias.
        """
        head = self.heads.get(task)
        if classes and getattr(head, "bias", None) is None:
            raise ModelError(f"task {task} has no head of its own with a bias, whose rows of classes could be closed")
        for label in classes:
            head.weight[label], head.bias[label] = 0.0, NO_CLASS

    def features(self, x: Tensor, task: int | Tensor) -> Tensor:
        """Return the features ``(batch, features)`` of ``x`` for one task label, or labels per sample ``(batch,)``."""
        return run_by_task(x, task, self._features) if self.features_per_task else run_backbone(self.backbone, x)

    def _features(self, x: Tensor, task: int) -> Tensor:
        """Return features of samples that all belong to ``task``; only called if :attr:`features_per_task` is True."""
        raise NotImplementedError

    def head(self, task: int) -> nn.Module:
        """Return a task's head; in evaluation mode, a task without a head gets a :class:`NoHead` (equal logits).

        Raises:
            UnknownTaskError: for a task without a head in training mode, or with an unknown number of classes.
        """
        if task not in self.heads:
            if not self.training and task in self._evaluated_untrained:
                return NoHead(self._evaluated_untrained[task])
            raise UnknownTaskError(f"task {task} has no head (untrained or unlearned); {list(self.tasks)} have one")
        return self.heads[task]

    def forward(self, x: Tensor, task_labels: int | Tensor | None = None) -> Any:
        """Return the logits of a batch, from the head of each sample's task.

        Args:
            x: ``(batch, …)``.
            task_labels: one label, or one per sample ``(batch,)``; None for the logits of every head, as LwF needs.

        Returns:
            ``(batch, classes)``; if tasks are mixed, with the largest number of classes, and ``-1000`` for classes
            unknown to a sample's task. For None a dict task → ``(batch, classes)``.

        Raises:
            UnknownTaskError: for a task without a head.
        """
        if task_labels is None:
            if self.features_per_task or not self.tasks:
                return {task: self.forward(x, task) for task in self.tasks}
            features = self.features(x, self.tasks[0])  # one pass, because features do not depend on the task
            return {task: self._logits(features, x, task) for task in self.tasks}
        task = single_task(task_labels)
        if task is not None:
            return self._logits(self.features(x, task), x, task)
        task_labels = _check_labels(task_labels, len(x))
        tasks = task_labels.unique().tolist()
        width = max(self.head(t).out_features for t in tasks)  # type: ignore[type-var]
        features = self.features(x, task_labels)
        logits = features.new_full((len(features), int(width)), NO_CLASS)  # type: ignore[arg-type]
        for t in tasks:
            rows = (task_labels == t).nonzero()[:, 0]
            own = self._logits(features[rows], x[rows], t)
            logits[rows, : own.shape[1]] = own
        return logits

    def _logits(self, features: Tensor, x: Tensor, task: int) -> Tensor:
        """Return the logits of the head of ``task``, plus the scores of the task's ridge regression if it has one."""
        head = self.head(task)
        logits: Tensor = head(features)
        ridge = head._buffers.get(_RIDGE)
        return logits if ridge is None else logits + ridge_scores(x, ridge).to(logits.dtype)

    def add_regression(self, task: int, ridge: Tensor) -> None:
        """Store the ridge regression ``ridge``, so that its scores are added to all later logits of ``task``."""
        self.heads[task].register_buffer(_RIDGE, ridge)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state like ``nn.Module.load_state_dict``, after adding and removing tasks to match it.

        Raises:
            TypeError: if ``state_dict`` is not a mapping of tensors.
            ValueError: for the state of another model; this model is then unchanged.
        """
        held = state_dict.items() if isinstance(state_dict, Mapping) else [("", None)]
        if not all(isinstance(value, Tensor) or name.endswith("_extra_state") for name, value in held):
            raise TypeError(
                f"load_state_dict takes a mapping of tensors, as model.state_dict() returns, got {state_dict!r:.80}: "
                "a file is read by torch.load(path), and the state of a whole strategy by load_state(strategy, path)"
            )
        tasks = self.task_state()
        try:
            self._match_tasks(state_dict)
            with register_all(self):
                if unlike := self._mismatches(state_dict, strict):
                    raise ValueError(
                        f"this state is that of another model than this {type(self).__name__}: {'; '.join(unlike)}. "
                        "Build the model from the same network with the same arguments"
                    )
                return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except Exception:
            self.restore_task_state(tasks)
            raise

    def _mismatches(self, state: Mapping[str, Tensor], strict: bool) -> list[str]:
        """Return texts of the differences between ``state`` and this model in shapes and, if ``strict``, in names."""
        here, there = shapes(self.state_dict()), shapes(state)
        other = [f"{name} is {s}, here {here[name]}" for name, s in there.items() if here.get(name, s) != s]
        lists = {"it lacks": sorted(here.keys() - there.keys()), "it has besides": sorted(there.keys() - here.keys())}
        return other + [f"{text} {names}" for text, names in lists.items() if names and strict]

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        saved: dict[int, dict[str, Tensor]] = {}
        for match in filter(None, map(_OF_TASK.fullmatch, state)):
            saved.setdefault(int(match[1]), {})[match[2]] = state[match[0]]
        saved = {task: tensors for task, tensors in saved.items() if self._head_entry in tensors}
        for task in set(self.tasks) - saved.keys():
            self.remove_task(task)
        for task, tensors in saved.items():
            if task not in self.heads or not self._fits(task, tensors):
                with torch.random.fork_rng(devices=[]):  # the draw is overwritten, so keep the random stream
                    self.store_task(task, self.head_for(tensors))

    def _fits(self, task: int, saved: Mapping[str, Tensor]) -> bool:
        """Return True if the modules of ``task`` have the names and shapes of the tensors in ``saved``."""
        return shapes(self.heads[task].state_dict()) == shapes(saved)

    def head_for(self, saved: Mapping[str, Tensor]) -> nn.Module:
        """Return a new head, with the task's norms or network inside, that can load the tensors in ``saved``."""
        own = {name.removeprefix("own."): value for name, value in saved.items() if name.startswith("own.")}
        head = self.new_head(saved["weight"].shape[0])
        if _RIDGE in saved:
            head.register_buffer(_RIDGE, torch.empty_like(saved[_RIDGE], device=self._device))
        return with_parts(head, self.parts_for(own))


def with_parts(head: nn.Module, parts: nn.Module | None) -> nn.Module:
    """Return a shallow copy of ``head`` that contains ``parts`` (the task's norms or network) as a submodule."""
    head = copy(head)  # a rollback may restore the given object
    head._modules = {} if parts is None else {"own": parts}
    return head


def shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return a dict of name to shape for all values of a ``state_dict``; () if a value is not a tensor."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


def backbone_entries(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the entries of ``values`` that belong to the backbone, with names relative to the backbone."""
    return {name.removeprefix(_BACKBONE): v for name, v in values.items() if name.startswith(_BACKBONE)}


def n_classes(experience: Any) -> int:
    """Return the number of classes that a head for an experience needs."""
    classes = getattr(experience, "classes_in_this_experience", None)
    if classes is None:
        classes = experience.dataset.targets.uniques
    return max(int(label) for label in classes) + 1


# Task labels: one per sample, mostly of one task ---------------------------------------------------------------------


class OneTask:
    """Factory of label tensors for a single task; :func:`single_task` recognises them without a GPU synchronisation."""

    def __init__(self, task: int, device: torch.device) -> None:
        self.task, self._label = task, torch.full((1,), task, device=device)

    def labels(self, n: int) -> Tensor:
        """Return the task labels ``(n,)`` of a mini-batch of ``n`` samples, as a view of a single number."""
        labels = self._label.expand(n)
        if not labels.is_inference():  # inference tensors have no version counter
            setattr(labels, _KNOWN, (self.task, labels._version))
        return labels


def single_task(task_labels: int | Tensor) -> int | None:
    """Return the task label that all samples of a batch have, or None if the batch mixes several tasks."""
    if type(task_labels) is int:
        return task_labels
    if not isinstance(task_labels, Tensor) or not task_labels.dim():
        return checks.integer(task_labels)
    known: tuple[int, int] | None = getattr(task_labels, _KNOWN, None)
    if known is not None and task_labels._version == known[1]:  # not changed in place since
        return known[0]
    if task_labels.stride(0) == 0:  # one value, expanded: nothing to compare
        return int(task_labels[0])
    lowest, highest = (int(label) for label in task_labels.aminmax())
    return lowest if lowest == highest else None


def _check_labels(task_labels: Any, n: int) -> Tensor:
    """Return ``task_labels`` unchanged; raise TypeError unless it is a tensor with one label per sample, ``(n,)``."""
    if not isinstance(task_labels, Tensor) or task_labels.shape != (n,):
        raise TypeError(f"task_labels must be an int, or a tensor of {n} labels of tasks, got {task_labels!r:.80}")
    return task_labels


def run_by_task(x: Tensor, task_labels: int | Tensor, run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Call ``run(samples, task)`` once per task in a batch; return all results in the order of the batch's samples."""
    single = single_task(task_labels)
    if single is not None:
        return run(x, single)
    task_labels = _check_labels(task_labels, len(x))
    rows = [(task_labels == label).nonzero()[:, 0] for label in task_labels.unique()]
    parts = torch.cat([run(x[of_task], int(task_labels[of_task[0]])) for of_task in rows])
    return parts[torch.cat(rows).argsort()]
