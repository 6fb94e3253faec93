"""Base classes of metrics: emitted after each training or unlearning, per unlearned task, against a retrained model."""

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
from avalanche_amnesia.evaluation.probes import Probe, ProbeKind, copy_probe, features_of
from avalanche_amnesia.evaluation.references import Expected, References, ReferencesError
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
    """Base class of metrics that return their values from Avalanche callbacks such as ``after_eval``."""

    axis = "event"
    """X axis on which a logger draws the values: ``event`` counts finished tasks and unlearnings."""

    def emit(self, strategy: Strategy, values: Mapping[str, Any]) -> list[MetricValue]:
        """Convert a dict of metric name to value into Avalanche metric values for the loggers; skip values of None."""
        x = strategy.clock.train_iterations
        return [MetricValue(self, name, value, x) for name, value in values.items() if value is not None]

    def emit_by_task(
        self, strategy: Strategy, name: str, by_task: Mapping[int, float], mean: float | None = None
    ) -> list[MetricValue]:
        """Return Avalanche metric values: one per task, and their mean, or the given ``mean`` in its place."""
        named = {get_metric_name(name, strategy, add_task=task): value for task, value in by_task.items()}
        if by_task:
            of_all = sum(by_task.values()) / len(by_task) if mean is None else mean
            named[get_metric_name(name, strategy, add_task=False)] = of_all
        return self.emit(strategy, named)

    def __str__(self) -> str:
        return type(self).__name__

    def result(self, strategy: Strategy | None = None) -> None:
        """Return None, because values come only from callbacks such as ``after_eval``."""

    def reset(self, strategy: Strategy | None = None) -> None:
        """Do nothing, because no values are accumulated."""


class EventMetric(CallbackMetric, ABC):
    """Base class of metrics emitted after every training and every unlearning, without an evaluation."""

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """After a task's training, and after an unlearning: return the metric's values."""
        return self.emit(strategy, self.current_values(strategy))

    after_unlearning = after_training_exp

    @abstractmethod
    def current_values(self, strategy: Strategy) -> Mapping[str, Any]:
        """Return the current values as a dict of metric name to value (None: not emitted)."""


class ProbingMetric(CallbackMetric, ABC):
    """Base class of metrics that measure unlearned tasks with copies of their masks and heads (probes)."""

    of_parts = False
    """True: the metric also has values if only samples of remaining tasks were unlearned."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: dict[int, Probe] = {}
        self._copies: dict[int, Probe] = {}
        self._loaded: dict[int, Any] = {}

    def state(self) -> dict[int, Any]:
        """Return the state to save: a dict of unlearned task to the tensors of its probe (copied mask and head)."""
        return {task: probe.state() for task, probe in self.probes.items()}

    def load_state(self, state: Any) -> None:
        """Keep the tensors of a saved :meth:`state` until :meth:`after_loading` builds heads and norms from them."""
        self._loaded = dict(state)

    def after_loading(self, strategy: Strategy) -> None:
        """After loading a strategy: build the saved probes (copied masks and heads) with the model's head class."""
        self.probes = {task: Probe.from_state(held, strategy.model) for task, held in self._loaded.items()}
        self._loaded = {}

    def before_unlearning(self, strategy: Strategy) -> None:
        """Before an unlearning: copy masks and heads of the tasks to be unlearned, unless ``keep_probes`` is False."""
        plugin = require_unlearning(strategy)
        assert plugin.current is not None
        for task in plugin.current.tasks:
            self.probes.pop(task, None)
        self._copies = {task: copy_probe(strategy.model, task) for task in plugin.current.tasks if plugin.keeps_probes}

    def after_unlearning(self, strategy: Strategy) -> None:
        """After an unlearning: store the probes (copied masks and heads) of the unlearned tasks."""
        self.probes |= self._copies
        self._copies = {}

    def after_training_exp(self, strategy: Strategy) -> None:
        """After a task's training: delete the probe (copied mask and head) from an earlier unlearning of the task."""
        self.probes.pop(int(strategy.experience.task_label), None)

    def after_eval(self, strategy: Strategy) -> list[MetricValue] | None:
        """After an evaluation: return the metric's values; None during a training and before the first unlearning."""
        plugin = require_unlearning(strategy)
        unlearned = plugin.ledger.unlearned or (self.of_parts and plugin.forgotten.hashes)
        if plugin.current_task is not None or not unlearned:
            return None
        values: Any = self.values(strategy, plugin.ledger.unlearned, plugin.ledger.remaining)
        for value in values if isinstance(values, Sequence) else [values]:
            if not isinstance(value, MetricValue) and values is not None:
                raise TypeError(f"{type(self).__name__}.values must return what self.emit(…) returns, got {values!r}")
        return values

    @abstractmethod
    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Return the metric's values after an evaluation; ``remaining``: the trained tasks not unlearned."""

    def probed_features(
        self, model: nn.Module, main: nn.Module, x: Tensor, task: int, remaining: Sequence[int], kind: ProbeKind
    ) -> Tensor | None:
        """Return features ``(n, features)`` of ``x`` in ``model``, computed with the masks that ``kind`` selects.

        ``own``: mask and norms of ``task``, from ``main`` (the run's model) or, if unlearned, its probe; ``remaining``:
        mean over the remaining tasks' masks; ``none``: no mask, initial norms. Returns None if a mask is missing.
        """
        with_norms = isinstance(main, TaskNormModel) and main.features_per_task
        if kind == "own" and (with_norms or isinstance(main, TaskMaskedModel)):
            probe = copy_probe(main, task) if task in remaining else self.probes.get(task)
            if probe is None or (probe.mask is None and probe.parts is None):
                return None
            return features_of(model, x, probe.mask, parts=probe.parts)
        if kind == "none" or not isinstance(main, TaskMaskedModel):
            return features_of(model, x, task=None if with_norms else task)
        assert isinstance(model, TaskMaskedModel)
        seen = [features_of(model, x, model.binary_mask(t), parts=model.task_parts(t)) for t in remaining]
        return torch.stack(seen).mean(0) if seen else None

    def probed_logits(self, model: nn.Module, x: Tensor, task: int) -> Tensor | None:
        """Return ``x``'s logits ``(n, classes)`` by an unlearned task's kept mask and head; None if none was kept."""
        probe = self.probes.get(task)
        if probe is None or probe.head is None:
            return None
        features = features_of(model, x, probe.mask, parts=probe.parts, task=task)
        with torch.no_grad():
            return probe.head.cpu()(features)

    def reset(self, strategy: Strategy | None = None) -> None:
        """Delete all probes (copied masks and heads)."""
        self.probes.clear()


class ReferenceMetric(ProbingMetric):
    """Base class of metrics with one number per unlearned task, for the model and for retrained reference models."""

    def __init__(self, references: References | None) -> None:
        super().__init__()
        self.references = references
        self._active_references = references
        self.variants: dict[str, Expected] = {}

    def before_training_exp(self, strategy: Strategy) -> None:
        """Before a task's training: raise an error if its data differ from those the reference models retrain on."""
        if self.references is not None:
            self.references.check(strategy.experience)

    def values(self, strategy: Strategy, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """Return the metric values of the main model and of the retrained models, then the values derived from them."""
        if self.references is not None:
            self._active_references = self.references.of(require_unlearning(strategy))
            prove_last_record(strategy, self.references)
        main, read, results = strategy.model, {}, []
        for suffix, model in self.models(main, remaining):
            found = {task: self.number(model, main, task, remaining) for task in self.tasks(unlearned, remaining)}
            read[suffix] = {task: number for task, number in found.items() if number is not None}
            results += self.emit_by_task(strategy, f"{self}{suffix}", read[suffix])
        covered = {get_metric_name(f"{self}_tasks", strategy, add_task=False): len(read[""])}
        return [*results, *self.emit(strategy, covered), *self.derived_values(strategy, read)]

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Return the tasks to measure: the unlearned tasks."""
        return unlearned

    def models(self, main: nn.Module, remaining: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
        """Yield (suffix for metric names, model): the main model with an empty suffix, then each retrained model."""
        yield "", main
        for suffix, variant in self.variants.items():
            assert self._active_references is not None
            yield suffix, self._active_references.reference(remaining, variant)

    @abstractmethod
    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Return ``task``'s value in ``model``: ``main``, or one retrained on ``remaining``; None if not measurable."""

    def derived_values(self, strategy: Strategy, numbers: dict[str, dict[int, float]]) -> list[MetricValue]:
        """Return further metric values, computed from ``numbers``: ``{model's name suffix: {task: number}}``."""
        return []


class ComparedMetric(ReferenceMetric):
    """Base class of metrics in [0, 1] per unlearned task, computed for the main model and for a retrained model.

    Args:
        benchmark: benchmark of the run; its streams contain the unlearned tasks' data.
        references: reference models of the run, for values named ``<name>_reference``; None: no comparison.

    Raises:
        TypeError: if ``benchmark`` has no test stream, or ``references`` is not a :class:`References`.
    """

    higher_is_better = False
    lower_bound, upper_bound = 0.0, 1.0
    helper: str
    """Name of the helper that makes the metric, for messages."""

    def __init__(self, benchmark: Any, references: References | None = None) -> None:
        super().__init__(references)
        if not hasattr(benchmark, "test_stream"):
            raise TypeError(f"first give the benchmark: {self.helper}(benchmark, references), got {benchmark!r}")
        if references is not None:
            checks.instance("references", references, References, "References(make_strategy, benchmark), or None")
            references.expect("same")
            self.variants = {"_reference": "same"}
        self.train_experiences = by_task_label(benchmark.train_stream)
        self.test_experiences = by_task_label(benchmark.test_stream)


class FeatureDistance(ReferenceMetric):
    """Base class of metrics: distance between the features of the main and of a retrained model, on tasks' test data.

    Lower is better; a value below its noise floor says no more than one at it. Emitted after every evaluation between
    tasks, from the first unlearning on, per task and as their mean, as ``<name>_<probe>`` and
    ``<name>_<probe>_floor_<floor>``. ``<name>_<probe>_ratio_order`` is the distance in units of its data-order floor
    (:func:`~avalanche_amnesia.evaluation.floor_ratio`: not emitted where either is below detection), over all tasks
    that of the two means. ``<name>_<probe>_tasks`` says how many tasks these means cover: ``own`` leaves out those of
    which no mask was kept (``keep_probes=False``). With another scope than the unlearned tasks, ``_on_<scope>`` follows
    the probe in all names.

    Args:
        references: reference models of the run.
        probe: ``own``: through the mask that the task had; ``remaining``: mean features over the masks of the
            remaining tasks; ``none``: the plain backbone with all units open. Models without masks use
            their plain backbone for all three.
        noise_floor: distances between two references to emit: trained with another data ``order``, or from
            another ``seed``.
        scope: tasks whose data is compared: ``unlearned``, ``remaining``, or ``all`` of both. ``own`` sees a remaining
            task through the mask that it has in the main model.

    Raises:
        TypeError: if ``references`` is not a :class:`References`.
        ValueError: for an unknown probe, floor or scope.
    """

    higher_is_better = False
    lower_bound: float = 0.0
    upper_bound: float
    references: References
    _active_references: References
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
            raise ValueError(f"noise_floor must be a list of 'order', 'seed', got {noise_floor!r}: [{noise_floor!r}]")
        for floor in noise_floor:
            checks.one_of("noise_floor", floor, Floor)
        checks.one_of("scope", scope, Scope)
        self.probe, self.noise_floor, self.scope = probe, tuple(noise_floor), scope
        self.variants = {f"_floor_{floor}": floor for floor in noise_floor}
        self.of_parts = scope != "unlearned"
        references.expect("same", *noise_floor)

    @abstractmethod
    def distance(self, features_a: Tensor, features_b: Tensor) -> float:
        """Return the distance between two models' features of a whole test set, each ``(n, features)``."""

    def tasks(self, unlearned: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
        """Return the tasks to measure, as the attribute ``scope`` selects: unlearned, remaining, or all of them."""
        return {"unlearned": unlearned, "remaining": remaining, "all": (*unlearned, *remaining)}[self.scope]

    def number(self, model: nn.Module, main: nn.Module, task: int, remaining: Sequence[int]) -> float | None:
        """Return the distance between a task's features in ``model`` and in a model retrained on ``remaining``."""
        x, _ = task_data(by_task_label(self.references.benchmark.test_stream)[task])
        both = (model, self._active_references.reference(remaining))
        ours, theirs = (self.probed_features(each, main, x, task, remaining, self.probe) for each in both)
        return None if ours is None or theirs is None else self.distance(ours, theirs)

    def derived_values(self, strategy: Strategy, numbers: dict[str, dict[int, float]]) -> list[MetricValue]:
        """Return each task's distance divided by the distance of two models retrained in different data orders."""
        by_task, floors = numbers[""], numbers.get("_floor_order")
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
    """Return a dict of task label to experience, for all experiences of a stream."""
    return {single_task(experience): experience for experience in labelled_stream(stream)}


def prove_last_record(strategy: Strategy, references: References) -> None:
    """Prove that the last unlearning is exact, if not done yet: compare the model's bits with a retrained one's."""
    plugin = require_unlearning(strategy)
    if not references.in_passing or not plugin.records or plugin.records[-1].proof is not None:
        return
    if plugin.records[-1].claim != "approximate":
        try:
            with suppress(RequestError):  # in the middle of a training
                plugin.prove(strategy, references, quiet=True)  # the loggers of this evaluation read the record
        except ReferencesError:
            references.in_passing = False  # made for other settings, which a metric may compare
        except ProofError as error:
            warnings.warn(str(error), stacklevel=2)


def require_unlearning(strategy: Strategy) -> UnlearningPlugin:
    """Return the strategy's UnlearningPlugin; raise TypeError if it has none."""
    plugin = find_plugin(strategy, UnlearningPlugin)
    if plugin is None:
        raise TypeError(
            f"unlearning metrics need an UnlearningPlugin, which {type(strategy).__name__} does not have: use "
            "AmnesiacHAT or WSN, or plugins=[TrajectoryPlugin(), UnlearningPlugin()]"
        )
    return plugin
