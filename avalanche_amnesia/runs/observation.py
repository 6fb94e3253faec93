"""One run of a stream with requests, observed after every task: numbers for tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.evaluation.accuracy_difference import accuracy_difference_metrics
from avalanche_amnesia.evaluation.capacity import capacity_metrics, network_capacity, trajectory_bytes
from avalanche_amnesia.evaluation.divergence import jsd_metrics
from avalanche_amnesia.evaluation.probes import unlearning_of
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.evaluation.unlearned_accuracy import unlearned_accuracy_metrics
from avalanche_amnesia.training.host.remaining import remaining_experiences


@dataclass(frozen=True)
class Observation:
    """Measurements after one task and its requests; None where a number does not exist.

    Attributes:
        task: the task just trained.
        unlearned_now: tasks unlearned since the last observation.
        remaining: remaining tasks.
        unlearned: all tasks unlearned so far.
        accuracy: remaining task → test accuracy.
        unlearned_accuracy: unlearned task → test accuracy through the head and mask that it had.
        reference_unlearned_accuracy: the mean of the same head's accuracies on the retrained reference.
        jsd: name of a JSD (``JSD_own``, ``JSD_own_floor_order`` …) → mean over the unlearned tasks, in bits.
        accuracy_difference: mean over remaining tasks, against the model that never unlearned.
        capacity: network capacity; None without masks.
        trajectory_bytes: bytes of trajectory.
        claim: of the last unlearning.
    """

    task: int
    unlearned_now: tuple[int, ...]
    remaining: tuple[int, ...]
    unlearned: tuple[int, ...]
    accuracy: dict[int, float]
    unlearned_accuracy: dict[int, float]
    reference_unlearned_accuracy: float | None
    jsd: dict[str, float]
    accuracy_difference: float | None
    capacity: float | None
    trajectory_bytes: int | None
    claim: str | None

    @property
    def mean_accuracy(self) -> float | None:
        """Mean over the remaining tasks."""
        return _mean(list(self.accuracy.values()))

    @property
    def mean_unlearned_accuracy(self) -> float | None:
        """Mean over the unlearned tasks."""
        return _mean(list(self.unlearned_accuracy.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the means."""
        means = {"mean_accuracy": self.mean_accuracy, "mean_unlearned_accuracy": self.mean_unlearned_accuracy}
        return asdict(self) | means


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one unlearning, and of training its reference from the beginning; when it was observed."""

    after_task: int
    unlearn: float
    retrain: float


@dataclass
class Run:
    """A finished run.

    Attributes:
        name: of the contestant.
        strategy: as it ended.
        observations: one per task, in order.
        records: of its unlearnings, as dicts without wall-clock times.
        timings: of its unlearnings.
    """

    name: str
    strategy: Any
    observations: list[Observation] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)


def observe(
    name: str,
    make_strategy: Callable[..., Any],
    benchmark: Any,
    *,
    noise_floor: Sequence[Any] = ("order", "seed"),
    loggers: Sequence[BaseLogger] = (),
    progress: Callable[[str], None] = lambda step: None,
    store: Any = None,
) -> Run:
    """Run a benchmark with requests through a strategy, with every metric and every reference.

    Args:
        name: of the contestant.
        make_strategy: as for :class:`References`.
        benchmark: from ``with_unlearning``.
        noise_floor: which floors to measure.
        loggers: Avalanche loggers of the main run.
        progress: called with a few words whenever a step is finished; once per task.
        store: a :class:`RunStore` for the references; by default a temporary one.
    """
    references = References(make_strategy, benchmark, store=store)
    evaluator = EvaluationPlugin(
        accuracy_metrics(experience=True),
        unlearned_accuracy_metrics(benchmark, references),
        jsd_metrics(references, noise_floor=noise_floor),
        accuracy_difference_metrics(references),
        capacity_metrics(),
        loggers=list(loggers) or [BaseLogger()],
    )
    run = Run(name, make_strategy(evaluator=evaluator))
    for experience in benchmark.train_stream:
        run.strategy.train(experience)
        results = run.strategy.eval(remaining_experiences(run.strategy, benchmark.test_stream))
        _note_unlearnings(run, references, int(experience.task_label))
        run.observations.append(_observation(run, experience, results))
        progress(f"{name}: task {experience.task_label}")
    return run


def _note_unlearnings(run: Run, references: References, task: int) -> None:
    plugin = unlearning_of(run.strategy)
    for record in plugin.records[len(run.records) :]:
        run.records.append({key: value for key, value in asdict(record).items() if key not in ("seconds", "time")})
        run.timings.append(Timing(task, record.seconds, references.seconds(record.remaining)))


def _observation(run: Run, experience: Any, results: dict[str, Any]) -> Observation:
    plugin = unlearning_of(run.strategy)
    ledger = plugin.ledger
    before = run.observations[-1].unlearned if run.observations else ()

    def value(metric: str, task: int | None = None) -> float | None:
        return results.get(f"{metric}/eval_phase/test_stream" + ("" if task is None else f"/Task{task:03d}"))

    accuracies = {t: results[f"Top1_Acc_Exp/eval_phase/test_stream/Task{t:03d}/Exp{t:03d}"] for t in ledger.remaining}
    unlearned_accuracies = {t: value("UnlearnedAccuracy", t) for t in ledger.unlearned}
    names = {key.split("/")[0] for key in results if key.startswith("JSD_") and key.endswith("test_stream")}
    means = sorted(name for name in names if not name.endswith("_tasks"))  # those count what a mean covers
    jsd = {name: value(name) for name in means} if ledger.unlearned else {}
    return Observation(
        task=int(experience.task_label),
        unlearned_now=tuple(t for t in ledger.unlearned if t not in before),
        remaining=ledger.remaining,
        unlearned=ledger.unlearned,
        accuracy=accuracies,
        unlearned_accuracy={t: v for t, v in unlearned_accuracies.items() if v is not None},
        reference_unlearned_accuracy=value("UnlearnedAccuracy_reference") if ledger.unlearned else None,
        jsd={name: v for name, v in jsd.items() if v is not None},
        accuracy_difference=value("AccuracyDifference"),
        capacity=network_capacity(run.strategy),
        trajectory_bytes=trajectory_bytes(run.strategy),
        claim=plugin.records[-1].claim if plugin.records else None,
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
