"""A backbone with one head per task, the base of all masked models; and the task labels of its mini-batches."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from avalanche.models import MultiTaskModule
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.models.task_store import TaskModules, TaskStore, whole
from avalanche_amnesia.unit_graph.backbones import check_backbone, run_on
from avalanche_amnesia.unit_graph.findings import ModelError

# Logits of classes that a sample's task does not have, where a batch mixes tasks with different numbers of classes.
NO_CLASS = -1000.0
_BACKBONE = "backbone."
_EXTRA = "_extra_state"
_KNOWN = "known_label"
_HEAD = re.compile(r"heads\.\d+\.weight")
Value = TypeVar("Value")


class UnknownTaskError(KeyError):
    """A task without a head was asked for: never trained, or unlearned."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoHead(nn.Module):
    """Head of a task that was never trained, or was unlearned: equal logits for every class."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.out_features = n_classes

    def forward(self, features: Tensor) -> Tensor:
        """``(batch, features)`` → zeros ``(batch, classes)``."""
        return features.new_zeros(len(features), self.out_features)


class MultiHeadModel(MultiTaskModule):
    """A feature extractor shared by all tasks, and one linear head for each.

    Unlike Avalanche's own multi-head classifier it makes no head while evaluating, so that evaluating never changes
    a later training, and a head can be taken out again. Where a stock strategy evaluates a task that has no head, all
    its classes get equal logits.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``.
        n_features: width of the features; by default ``backbone.features``, where that is an integer.

    Raises:
        ModelError: if the width of the features is not known, or the backbone is none.
        TypeError: for a backbone that is no module.
    """

    task_containers: tuple[str, ...] = ("heads",)
    """Names of the containers that hold a task's own modules under its label."""
    features_per_task = False
    """True: features depend on the task, through norms, a mask or a network of its own."""
    state_per_task = False
    """True: each task has its own of all that forward keeps beside the parameters (running statistics, buffers)."""
    isolates: bool = False
    """True: the training of a task neither reads nor writes anything of one that may be unlearned."""
    trains_again = False
    """True: whatever trains the model, a task can be trained again in its place, with others trained since."""

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__()
        check_backbone(backbone)
        width = checks.integer(getattr(backbone, "features", None) if n_features is None else n_features)
        if width is None or width < 1:
            raise ModelError(
                f"give n_features=, the width of what {type(backbone).__name__} returns: "
                f"{type(self).__name__}(backbone, n_features=64)"
            )
        self.backbone = backbone
        self.n_features: int = width
        self.heads = TaskModules()
        self._evaluated_untrained: dict[int, int] = {}

    def begins_as(self, name: str) -> str:
        """Name of the parameter as which a task's own one begins; its own name where it is drawn."""
        return name

    def free_share(self) -> float | None:
        """Share of its weights that no task owns, in [0, 1]; None where weights are nobody's own."""
        return None

    @property
    def _device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def _containers(self) -> list[TaskModules]:
        return [getattr(self, name) for name in self.task_containers]

    @property
    def _stores(self) -> list[TaskStore]:
        return [module for module in self.children() if isinstance(module, TaskStore)]

    @property
    def tasks(self) -> tuple[int, ...]:
        """Labels of the tasks that have a head, in the order they were made."""
        return self.heads.tasks

    def adaptation(self, experience: Any) -> None:
        """Make the head of a task that is about to be trained; while evaluating, only note how many classes it has."""
        if not hasattr(experience, "task_labels"):
            raise UnknownTaskError(
                "an experience has no task labels, by which heads are told apart: give its stream some, by "
                "task_incremental_benchmark(benchmark, reset_task_labels=True)"
            )
        for task in experience.task_labels:
            if task not in self.heads:
                if self.training:
                    self.add_head(int(task), _n_classes(experience))
                else:
                    self._evaluated_untrained[int(task)] = _n_classes(experience)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module``'s; where all lies on the device already, as before most evaluations, nothing is done."""
        if len(args) == 1 and isinstance(args[0], (str, torch.device)) and not kwargs:
            device = torch.device(args[0])
            if all(tensor.device == device for tensor in (*self.parameters(), *self.buffers())):
                return self
        return super().to(*args, **kwargs)

    def add_head(self, task: int, n_classes: int) -> None:
        """Add a freshly drawn head ``features → n_classes`` for a task."""
        self.heads[task] = self._new_head(n_classes)
        self.known_train_tasks_labels.add(task)

    def _new_head(self, n_classes: int) -> nn.Module:
        like = next(self.backbone.parameters())
        return nn.Linear(self.n_features, n_classes, device=like.device, dtype=like.dtype)

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters like those of a next task's head, for whoever must know their shapes; no part of the model."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            return list(self._new_head(1).parameters())

    def remove_task(self, task: int) -> None:
        """Take out everything that belongs to the task alone."""
        for store in self._stores:
            store.drop(task)
        self.known_train_tasks_labels.discard(task)

    def task_modules(self, task: int) -> list[nn.Module]:
        """The modules that belong to the task alone: its head first, then whatever else it has.

        Raises:
            UnknownTaskError: if the task has no head.
        """
        head = self.heads[task] if task in self.heads else self.head(task)
        return [head, *(held[task] for held in self._containers[1:] if task in held)]

    def buffer_names(self, tasks: Sequence[int]) -> list[str]:
        """Names, in ``state_dict``, of everything but parameters that goes with the tasks."""
        return [
            f"{path}.{task}.{name}"
            for path, container in zip(self.task_containers, self._containers, strict=True)
            for task in tasks
            if task in container
            for name, _ in container[task].named_buffers()
        ]

    def task_state(self) -> Any:
        """State that belongs to single tasks, for :meth:`restore_task_state`; holds references, copies nothing."""
        return [store.state() for store in self._stores], set(self.known_train_tasks_labels)

    def restore_task_state(self, state: Any) -> None:
        """Go back to what :meth:`task_state` returned."""
        states, known = state
        for store, held in zip(self._stores, states, strict=True):
            store.restore(held)
        self.known_train_tasks_labels = set(known)

    def tasks_read(self, task: int) -> Sequence[int]:
        """Other tasks without which a finished task has no network."""
        return ()

    @torch.no_grad()
    def close_classes(self, task: int, classes: Sequence[int]) -> None:
        """Write -1000 into some rows of a task's head, as bias: it predicts these classes no more.

        Raises:
            ModelError: for a head that is not the task's own, or has no bias.
        """
        head = self.heads.get(task)
        if classes and getattr(head, "bias", None) is None:
            raise ModelError(f"task {task} has no head of its own with a bias, whose rows of classes could be closed")
        for label in classes:
            head.weight[label], head.bias[label] = 0.0, NO_CLASS

    def features(self, x: Tensor, task: int | Tensor) -> Tensor:
        """Backbone features ``(batch, features)`` of ``x`` for a task label, or one label per sample ``(batch,)``."""
        return by_task(x, task, self._features) if self.features_per_task else run_on(self.backbone, x)

    def _features(self, x: Tensor, task: int) -> Tensor:
        """Features of samples of one task, where they depend on it."""
        raise NotImplementedError

    def head(self, task: int) -> nn.Module:
        """The head of a task.

        Raises:
            UnknownTaskError: if the task has none.
        """
        if task not in self.heads:
            if not self.training and task in self._evaluated_untrained:
                return NoHead(self._evaluated_untrained[task])
            raise UnknownTaskError(
                f"task {task} has no head: it was never trained, or was unlearned; tasks with a head: "
                f"{list(self.tasks)}. Evaluate those alone"
            )
        return self.heads[task]

    def forward(self, x: Tensor, task_labels: int | Tensor | None = None) -> Any:
        """Logits of a batch.

        Args:
            x: ``(batch, …)``.
            task_labels: one label, or one per sample ``(batch,)``; None for every head's logits, as LwF asks.

        Returns:
            ``(batch, classes)``; where tasks are mixed, the widest task's classes, with ``-1000`` for those that a
            sample's task does not have. For None a dict task → ``(batch, classes)``.

        Raises:
            UnknownTaskError: for a task without a head.
        """
        if task_labels is None:
            return self._all_logits(x)
        task = single_task(task_labels)
        if task is not None:
            return self.head(task)(self.features(x, task))
        task_labels = _one_each(task_labels, len(x))
        heads = {int(t): self.head(int(t)) for t in task_labels.unique()}
        features = self.features(x, task_labels)
        width = max(head.out_features for head in heads.values())  # type: ignore[type-var]
        logits = features.new_full((len(features), int(width)), NO_CLASS)  # type: ignore[arg-type]
        for t, head in heads.items():
            rows = (task_labels == t).nonzero()[:, 0]
            own = head(features[rows])
            logits[rows, : own.shape[1]] = own
        return logits

    def _all_logits(self, x: Tensor) -> dict[int, Tensor]:
        """Logits of every head: task → ``(batch, classes)``."""
        if self.features_per_task or not self.tasks:
            return {task: self.forward(x, task) for task in self.tasks}
        features = self.features(x, self.tasks[0])  # the same for all tasks: one pass serves them
        return {task: self.head(task)(features) for task in self.tasks}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module``'s, after giving the model the tasks that the state has, and no others.

        Raises:
            TypeError: for what is no mapping of tensors.
            ValueError: for the state of another model; nothing changed.
        """
        given = type(state_dict).__name__
        if isinstance(state_dict, Mapping):  # of tensors, and what a module makes of its own beside them
            others = ((n, v) for n, v in state_dict.items() if not (isinstance(v, Tensor) or n.endswith(_EXTRA)))
            given = next((f"{name}: {type(value).__name__}" for name, value in others), "")
        if given:
            raise TypeError(
                f"load_state_dict takes a mapping of tensors, as model.state_dict() returns it, got {given}; a file is "
                "read by torch.load(path), and the state of a whole strategy by load_state(strategy, path)"
            )
        tasks, unlike, before = self.task_state(), [], []
        with whole(self):
            values = [*self.parameters(), *self.buffers()]
        try:
            self._match_tasks(state_dict)
            with whole(self):
                unlike = self._unlike(state_dict)
                before = [value.detach().clone() for value in values] if unlike else []
                return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except Exception as error:
            with torch.no_grad():
                for value, held in zip(values, before, strict=False):  # torch has loaded by then what fits
                    value.copy_(held)
            self.restore_task_state(tasks)
            if not isinstance(error, RuntimeError):
                raise
            raise ValueError(
                f"this state is that of another model than this {type(self).__name__}: {'; '.join(unlike) or error}. "
                "Build the model from the same network with the same arguments"
            ) from error

    def _unlike(self, state: Mapping[str, Tensor]) -> list[str]:
        """Tensors of a state that the model has otherwise or not at all, and those that the state lacks, in words."""
        here, there = ({n: tuple(getattr(v, "shape", ())) for n, v in of.items()} for of in (self.state_dict(), state))
        other = [f"{name} is {s}, here {here[name]}" for name, s in there.items() if here.get(name, s) != s]
        lists = {"it lacks": sorted(here.keys() - there.keys()), "it has besides": sorted(there.keys() - here.keys())}
        return other + [f"{text} {names}" for text, names in lists.items() if names]

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        shapes = {
            int(name.split(".")[1]): value.shape
            for name, value in state.items()
            if _HEAD.fullmatch(name) and value.dim() == 2
        }
        for task in set(self.tasks) - set(shapes):
            self.remove_task(task)
        for task, shape in shapes.items():
            if task in self.heads and self.heads[task].weight.shape == shape:
                continue
            with torch.random.fork_rng(devices=[]):  # the draw is overwritten: nobody's stream should pay for it
                self.add_head(task, shape[0])


def inside_backbone(values: Mapping[str, Value]) -> dict[str, Value]:
    """Values of the backbone's parameters, by their names inside it; those of other parameters are left out."""
    return {name.removeprefix(_BACKBONE): v for name, v in values.items() if name.startswith(_BACKBONE)}


def _n_classes(experience: Any) -> int:
    classes = getattr(experience, "classes_in_this_experience", None)
    if classes is None:
        classes = experience.dataset.targets.uniques
    return max(int(label) for label in classes) + 1


# Task labels: one per sample, mostly of one task ---------------------------------------------------------------------


class OneTask:
    """Labels of mini-batches of one task, which :func:`single_task` knows without waiting for an accelerator."""

    def __init__(self, task: int, device: torch.device) -> None:
        self.task, self._label = task, torch.full((1,), task, device=device)

    def labels(self, n: int) -> Tensor:
        """Labels of a mini-batch, ``(n,)``: one number in memory."""
        labels = self._label.expand(n)
        if not labels.is_inference():  # these don't count what is written into them
            setattr(labels, _KNOWN, (self.task, labels._version))
        return labels


def single_task(task_labels: int | Tensor) -> int | None:
    """The one task of a batch, None where it mixes several."""
    if type(task_labels) is int:
        return task_labels
    if not isinstance(task_labels, Tensor) or not task_labels.dim():
        return checks.integer(task_labels)
    known: tuple[int, int] | None = getattr(task_labels, _KNOWN, None)
    if known is not None and task_labels._version == known[1]:  # nobody has written into it since
        return known[0]
    if task_labels.stride(0) == 0:  # one value, expanded: nothing to compare
        return int(task_labels[0])
    lowest, highest = (int(label) for label in task_labels.aminmax())
    return lowest if lowest == highest else None


def _one_each(task_labels: Any, n: int) -> Tensor:
    """Labels of a batch in which tasks are mixed."""
    if not isinstance(task_labels, Tensor) or task_labels.shape != (n,):
        raise TypeError(
            f"task_labels must be the label of a task (an int), or a tensor of one label for each of {n} samples, got "
            f"{task_labels!r:.80}"
        )
    return task_labels


def by_task(x: Tensor, task_labels: int | Tensor, run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply a function of samples and their task to a batch in which tasks may be mixed."""
    single = single_task(task_labels)
    if single is not None:
        return run(x, single)
    task_labels = _one_each(task_labels, len(x))
    rows = [(task_labels == label).nonzero()[:, 0] for label in task_labels.unique()]
    parts = [run(x[of_task], int(task_labels[of_task[0]])) for of_task in rows]
    return torch.cat(parts)[torch.cat(rows).argsort()]
