"""Base classes of metrics: per event, per unlearned task, and per unlearned task with a retrained reference model."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import ProofError
from avalanche_amnesia.benchmarks.data import single_task, task_data
from avalanche_amnesia.benchmarks.stream_labels import labelled_stream
from avalanche_amnesia.evaluation.probes import Probe, ProbeKind, features_of, take_probe
from avalanche_amnesia.evaluation.references import References, ReferencesError
from avalanche_amnesia.evaluation.resolution import floor_ratio
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.task_norm import TaskNormModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

Floor = Literal["order", "seed"]
Scope = Literal["unlearned", "remaining", "all"]
"""Tasks whose data is compared: the unlearned ones, the remaining ones, or all that were seen."""


class CallbackMetric(PluginMetric):
    """A metric that emits the values returned by its callbacks."""

    axis = "event"
    """Axis along which a logger draws it: it changes with tasks and unlearnings."""

    def emit(self, strategy: Strategy, named: Mapping[str, Any]) -> list[MetricValue]:
        """Return a metric value for each number that is not None."""
        x = strategy.clock.train_iterations
        return [MetricValue(self, name, value, x) for name, value in named.items() if value is not None]

    def emit_by_task(
        self, strategy: Strategy, name: str, by_task: Mapping[int, float], mean: float | None = None
    ) -> list[MetricValue]:
        """One value per task and their mean, of an evaluation; ``mean``: in the place of that of the tasks' values."""
        named = {get_metric_name(name, strategy, add_task=task): value for task, value in by_task.items()}
        if by_task:
            of_all = sum(by_task.values()) / len(by_task) if mean is None else mean
            named[get_metric_name(name, strategy, add_task=False)] = of_all
        return self.emit(strategy, named)

    def result(self, strategy: Strategy | None = None) -> None:
        """Only the callbacks emit values."""

    def reset(self, strategy: Strategy | None = None) -> None:
        """Do nothing: no values are accumulated."""


class EventMetric(CallbackMetric, ABC):
    """A metric of the strategy itself, emitted after every training and every unlearning; it needs no evaluation."""

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """Return the values after the training of a task."""
        return self.emit(strategy, self.named(strategy))

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Return the values after an unlearning."""
        return self.emit(strategy, self.named(strategy))

    @abstractmethod
    def named(self, strategy: Strategy) -> Mapping[str, Any]:
        """Return the current values by name; None for a missing value."""


class ProbingMetric(CallbackMetric, ABC):
    """A metric of unlearned tasks: collects their probes, and emits its values after each evaluation between tasks."""

    of_parts = False
    """True: the metric also has values if only samples of remaining tasks were unlearned."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: dict[int, Probe] = {}
        self._taken: dict[int, Probe] = {}
        self._loaded: dict[int, Any] = {}

    def state(self) -> dict[int, Any]:
        """Return the state to save: the tensors of the probes."""
        return {task: probe.state() for task, probe in self.probes.items()}

    def load_state(self, state: Any) -> None:
        """Load a saved state; :meth:`after_loading` builds the heads and norms."""
        self._loaded = dict(state)

    def after_loading(self, strategy: Strategy) -> None:
        """Make heads and norms like those that the model's own tasks have."""
        self.probes = {task: Probe.from_state(held, strategy.model) for task, held in self._loaded.items()}
        self._loaded = {}

    def before_unlearning(self, strategy: Strategy) -> None:
        """Copy the masks and heads of the requested tasks, if the unlearning allows it."""
        plugin = unlearning_of(strategy)
        assert plugin.current is not None
        for task in plugin.current.tasks:
            self.probes.pop(task, None)
        self._taken = {task: take_probe(strategy.model, task) for task in plugin.current.tasks if plugin.keeps_probes}

    def after_unlearning(self, strategy: Strategy) -> None:
        """Keep the copies made before the unlearning."""
        self.probes |= self._taken
        self._taken = {}

    def after_training_exp(self, strategy: Strategy) -> None:
        """Drop the probe of a relearned task."""
        self.probes.pop(int(strategy.experience.task_label), None)

    def after_eval(self, strategy: Strategy) -> list[MetricValue] | None:
        """Return the metric's values, or None during a task and before the first unlearning."""
        plugin = unlearning_of(strategy)
        gone = plugin.ledger.unlearned or (self.of_parts and plugin.forgotten.hashes)
        if plugin.current_task is not None or not gone:
            return None
        values: Any = self.values(strategy, plugin.ledger.unlearned, plugin.ledger.remaining)
        for value in values if isinstance(values, Sequence) else [values]:
            if not isinstance(value, MetricValue) and values is not None:
                raise TypeError(
                    f"values of {type(self).__name__} returned {values!r}: return a list of MetricValue, as "
                    "self.emit(strategy, {name: value}) makes it"
                )
        return values

    @abstractmethod
    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Return the values to emit, made by :meth:`emit`."""

    def probed_features(
        self, model: nn.Module, main: nn.Module, x: Tensor, task: int, remaining: Sequence[int], kind: ProbeKind
    ) -> Tensor | None:
        """Features ``(n, features)`` of a task's inputs in a model, which may be ``main`` itself; None without a mask.

        They are on the CPU. For the kinds of probes see :class:`FeatureDistance`; ``none`` uses the normalisation from
        before the first task. A remaining task's own mask and norms are the main model's; where a model has no masks,
        norms that the task had of its own count for ``own``.
        """
        with_norms = isinstance(main, TaskNormModel) and main.features_per_task
        if kind == "own" and (with_norms or isinstance(main, TaskMaskedModel)):
            probe = take_probe(main, task) if task in remaining else self.probes.get(task)
            if probe is None or (probe.mask is None and probe.parts is None):
                return None
            return features_of(model, x, probe.mask, parts=probe.parts)
        if kind == "none" or not isinstance(main, TaskMaskedModel):
            return features_of(model, x, task=None if with_norms else task)
        assert isinstance(model, TaskMaskedModel)
        seen = [features_of(model, x, model.binary_mask(t), parts=model.task_parts(t)) for t in remaining]
        return torch.stack(seen).mean(0) if seen else None

    def probed_logits(self, model: nn.Module, x: Tensor, task: int) -> Tensor | None:
        """Return logits ``(n, classes)`` of an unlearned task's kept head, or None if no head was kept."""
        probe = self.probes.get(task)
        if probe is None or probe.head is None:
            return None
        features = features_of(model, x, probe.mask, parts=probe.parts, task=task)
        with torch.no_grad():
            logits: Tensor = probe.head.cpu()(features)
        return logits

    def reset(self, strategy: Strategy | None = None) -> None:
        """Drop all probes."""
        self.probes.clear()


class ReferenceMetric(ProbingMetric):
    """A metric with one number per unlearned task and model: the main model, and references with a suffix."""

    def __init__(self, references: References | None) -> None:
        super().__init__()
        self.references = references
        self._beside = references

    def before_training_exp(self, strategy: Strategy) -> None:
        """Check that the references are trained on the same data."""
        if self.references is not None:
            self.references.check(strategy.experience)

    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Return the numbers of the main model, then those of the reference models."""
        if self.references is not None:
            plugin = unlearning_of(strategy)
            self.references.check_labels(plugin.data)
            self._beside = self.references.of(plugin)
            prove_in_passing(strategy, self.references)
        main, read, results = strategy.model, {}, []
        for suffix, model in self.models(main, remaining):
            found = {task: self.number(model, main, task, remaining) for task in self.tasks(unlearned, remaining)}
            read[suffix] = {task: number for task, number in found.items() if number is not None}
            results += self.emit_by_task(strategy, f"{self}{suffix}", read[suffix])
        covered = {get_metric_name(f"{self}_tasks", strategy, add_task=False): len(read[""])}
        return [*results, *self.emit(strategy, covered), *self.derived(strategy, read)]

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Return the tasks that have a number."""
        return unlearned

    @abstractmethod
    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """Yield the suffix and model of each reading; first the main model, with an empty suffix."""

    @abstractmethod
    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Return the number of one task in one of :meth:`models`, or None if the task has no probe."""

    def derived(self, strategy: Strategy, read: dict[str, dict[int, float]]) -> list[MetricValue]:
        """Further values, from all that was read: suffix → task → number."""
        return []


class ComparedMetric(ReferenceMetric):
    """A number per unlearned task, of the main model and of the reference, under the same name with ``_reference``.

    Args:
        benchmark: of the run; its streams hold the unlearned tasks' data.
        references: of the run; None: no comparison.

    Raises:
        TypeError: for a benchmark or references that are none.
    """

    helper: str
    """Name of the helper that makes the metric, for messages."""

    def __init__(self, benchmark: Any, references: References | None = None) -> None:
        super().__init__(references)
        if not hasattr(benchmark, "test_stream"):
            raise TypeError(
                f"the first argument is the benchmark: {self.helper}(benchmark, references), got {benchmark!r}"
            )
        if references is not None:
            checks.instance("references", references, References, "References(make_strategy, benchmark), or None")
            references.expect("same")
        self.test_experiences = by_task_label(benchmark.test_stream)

    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """The main model, and the reference if there is one."""
        yield "", main
        if self._beside is not None:
            yield "_reference", self._beside.reference(remaining)


class FeatureDistance(ReferenceMetric):
    """Distance between main and reference features of tasks' test data: base of one class per distance.

    Lower is better; a value below its noise floor says no more than one at it. Emitted after every evaluation between
    tasks, from the first unlearning on, per task and as their mean, as ``<name>_<probe>`` and
    ``<name>_<probe>_floor_<floor>``. ``<name>_<probe>_ratio_order`` is the distance in units of its order floor
    (:func:`~avalanche_amnesia.evaluation.floor_ratio`: not emitted where either is below detection), over all tasks
    that of the two means. ``<name>_<probe>_tasks`` says how many tasks these means cover: ``own`` leaves out those of
    which no mask was kept (``keep_probes=False``). With another scope than the unlearned tasks, ``_on_<scope>`` follows
    the probe in all names.

    Args:
        references: of the run.
        probe: ``own``: through the mask that the task had; ``remaining``: mean features over the masks of the
            remaining tasks; ``none``: the plain backbone with all units open. Models without masks use
            their plain backbone for all three.
        noise_floor: distances between two references to emit: trained with another data ``order``, or from
            another ``seed``.
        scope: tasks whose data is compared: ``unlearned``, ``remaining``, or ``all`` of both. ``own`` sees a remaining
            task through the mask that it has in the main model.

    Raises:
        TypeError: for references that are none.
        ValueError: for an unknown probe, floor or scope.
    """

    higher_is_better = False
    lower_bound: float = 0.0
    upper_bound: float
    references: References
    _beside: References
    name: str
    """Name of the distance, with which the names of its values begin."""

    def __init__(
        self,
        references: References,
        probe: ProbeKind = "own",
        noise_floor: Sequence[Floor] = (),
        scope: Scope = "unlearned",
    ) -> None:
        super().__init__(references)
        checks.instance("references", references, References, "References(make_strategy, benchmark)")
        checks.one_of("probe", probe, ProbeKind)
        if isinstance(noise_floor, str):
            raise ValueError(
                f"noise_floor must be a list of 'order' and 'seed', got {noise_floor!r}: [{noise_floor!r}]"
            )
        for floor in noise_floor:
            checks.one_of("noise_floor", floor, Floor)
        checks.one_of("scope", scope, Scope)
        self.probe, self.noise_floor, self.scope = probe, tuple(noise_floor), scope
        self.of_parts = scope != "unlearned"
        references.expect("same", *noise_floor)

    @abstractmethod
    def distance(self, features_a: Tensor, features_b: Tensor) -> float:
        """Distance over a whole test set, ``(n, features)`` twice."""

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Return the tasks of the scope."""
        return {"unlearned": unlearned, "remaining": remaining, "all": (*unlearned, *remaining)}[self.scope]

    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """The main model, then a reference per floor."""
        yield "", main
        for floor in self.noise_floor:
            yield f"_floor_{floor}", self._beside.reference(remaining, floor)

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Distance of the features to the reference's; None where there is no mask to look through."""
        x, _ = task_data(self.references.test_experience(task))
        both = (model, self._beside.reference(remaining))
        ours, theirs = (self.probed_features(each, main, x, task, remaining, self.probe) for each in both)
        return None if ours is None or theirs is None else self.distance(ours, theirs)

    def derived(self, strategy: Strategy, read: dict[str, dict[int, float]]) -> list[MetricValue]:
        """Return the distances in units of the order floor; the larger seed floor would flatter every method."""
        by_task, floors = read[""], read.get("_floor_order")
        if floors is None:
            return []
        ratios = {task: floor_ratio(distance, floors[task]) for task, distance in by_task.items()}
        there = {task: ratio for task, ratio in ratios.items() if ratio is not None}
        # Of the means: a single floor near 0 would rule the mean of the ratios.
        mean = floor_ratio(sum(by_task.values()), sum(floors.values()))
        return self.emit_by_task(strategy, f"{self}_ratio_order", there, mean)

    def __str__(self) -> str:
        return f"{self.name}_{self.probe}" + ("" if self.scope == "unlearned" else f"_on_{self.scope}")


def by_task_label(stream: Iterable[Any]) -> dict[int, Any]:
    """Task → its experience in a stream."""
    return {single_task(experience): experience for experience in labelled_stream(stream)}


def prove_in_passing(strategy: Strategy, references: References) -> None:
    """Prove the last record by a reference that a metric needs anyway, unless it was proved before."""
    plugin = unlearning_of(strategy)
    if not references.in_passing or not plugin.records or plugin.records[-1].proof is not None:
        return
    if plugin.records[-1].claim != "approximate":
        try:
            with suppress(RequestError):  # in the middle of a training
                plugin.prove(strategy, references, quiet=True)  # the loggers of this evaluation look at the record
        except ReferencesError:
            references.in_passing = False  # made for other settings, which a metric may compare
        except ProofError as error:
            warnings.warn(str(error), stacklevel=2)


def unlearning_of(strategy: Strategy) -> UnlearningPlugin:
    """Return the strategy's UnlearningPlugin."""
    plugin = find_plugin(strategy, UnlearningPlugin)
    if plugin is None:
        raise TypeError(
            f"unlearning metrics need an UnlearningPlugin, which {type(strategy).__name__} does not have: use "
            "AmnesiacHAT or WSN, or plugins=[TrajectoryPlugin(), UnlearningPlugin()]"
        )
    return plugin
