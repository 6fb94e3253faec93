"""One run of a stream with requests, observed after every task: numbers for tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.contrib.metrics.cost import cost_metrics
from avalanche_amnesia.contrib.metrics.membership import membership_metrics
from avalanche_amnesia.contrib.metrics.overlap import mask_overlap_metrics, overlap_matrix
from avalanche_amnesia.contrib.metrics.ownership import owners_by_layer, owners_metrics
from avalanche_amnesia.contrib.metrics.relapse import few_shot_metrics, relapse_metrics
from avalanche_amnesia.evaluation.accuracy_difference import AccuracyDifference, accuracy_difference_metrics
from avalanche_amnesia.evaluation.accuracy_matrix import (
    AccuracyMatrix,
    accuracy_matrix_metrics,
    backward_transfer,
    forgetting,
)
from avalanche_amnesia.evaluation.capacity import capacity_metrics, network_capacity, trajectory_bytes
from avalanche_amnesia.evaluation.feature_distance import distance_metrics
from avalanche_amnesia.evaluation.jsd import jsd_metrics
from avalanche_amnesia.evaluation.probes import unlearning_of
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.evaluation.unlearned_accuracy import unlearned_accuracy_metrics
from avalanche_amnesia.lab.runs.reference_workers import ReferenceWorkers
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.training.host.remaining import remaining_experiences

Shares = dict[str, dict[str, float]]
"""Layer → ``free``, ``shared`` and each task's label → share of the layer's units or weights."""


@dataclass(frozen=True)
class Observation:
    """Measurements after one task and its requests; None, or left out of a mapping, where a number does not exist.

    Attributes:
        task: the task just trained.
        unlearned_now: tasks unlearned since the last observation.
        remaining: remaining tasks.
        unlearned: all tasks unlearned so far.
        accuracy: remaining task → test accuracy.
        unlearned_accuracy: unlearned task → test accuracy through the head and mask that it had.
        reference_unlearned_accuracy: the mean of the same head's accuracies on the retrained reference.
        reference_unlearned: unlearned task → accuracy of the same head on the retrained reference.
        chance: unlearned task → 1 / number of its classes.
        relapse: unlearned task → test accuracy of a linear probe fitted to the model's features.
        relapse_reference: unlearned task → the same of the retrained reference.
        few_shot: unlearned task → test accuracy of a head fitted to a few samples of it.
        few_shot_reference: unlearned task → the same of the retrained reference.
        membership: unlearned task → AUC with which losses tell its training samples from test samples.
        membership_reference: unlearned task → the same of the retrained reference.
        jsd: name of a JSD (``JSD_own``, ``JSD_own_floor_order`` …) → mean over the unlearned tasks, in bits; of a
            ratio to a floor (``JSD_own_ratio_order``) → ratio of the two means.
        jsd_by_task: the same name → unlearned task → its value.
        distances: name of another distance (``Euclidean_own``, ``CKA_own_floor_seed`` …) → likewise.
        accuracy_difference: mean over remaining tasks, against the model that never unlearned.
        accuracy_difference_control: what heads fitted anew to that model gain alone, the mean likewise.
        full_accuracy: remaining task → accuracy of the model that never unlearned.
        reference_accuracy: remaining task → accuracy of the retrained reference.
        average_forgetting: mean over remaining tasks of the best earlier accuracy minus the present one.
        backward_transfer: mean over remaining tasks of the present accuracy minus the first one.
        capacity: network capacity; None without masks.
        capacity_before: before the first unlearning since the last observation; None where there was none.
        overlap: ``tasks``, the remaining ones, and ``shares``, a row per task of the intersection over union of their
            masks; None without masks.
        owners: who owns each layer's units or weights; None without masks.
        owners_before: the same before the first unlearning since the last observation; None where there was none.
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
    reference_unlearned: dict[int, float]
    chance: dict[int, float]
    relapse: dict[int, float]
    relapse_reference: dict[int, float]
    few_shot: dict[int, float]
    few_shot_reference: dict[int, float]
    membership: dict[int, float]
    membership_reference: dict[int, float]
    jsd: dict[str, float]
    jsd_by_task: dict[str, dict[int, float]]
    distances: dict[str, float]
    accuracy_difference: float | None
    accuracy_difference_control: float | None
    full_accuracy: dict[int, float]
    reference_accuracy: dict[int, float]
    average_forgetting: float | None
    backward_transfer: float | None
    capacity: float | None
    capacity_before: float | None
    overlap: dict[str, Any] | None
    owners: Shares | None
    owners_before: Shares | None
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
    workers: int = 0,
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
        workers: processes that train references while the run goes on (:class:`ReferenceWorkers`).
    """
    ahead = ReferenceWorkers(workers) if workers else None
    references = References(make_strategy, benchmark, store=store or RunStore(), workers=ahead)
    (matrix,), before = accuracy_matrix_metrics(), _Before()
    (difference,) = accuracy_difference_metrics(references, controls=("heads", "reference"))
    evaluator = EvaluationPlugin(
        accuracy_metrics(experience=True),
        matrix,
        unlearned_accuracy_metrics(benchmark, references),
        relapse_metrics(benchmark, references),
        few_shot_metrics(benchmark, references),
        membership_metrics(benchmark, references),
        jsd_metrics(references, noise_floor=noise_floor),
        distance_metrics(references, noise_floor=noise_floor),
        difference,
        capacity_metrics(),
        mask_overlap_metrics(),
        owners_metrics(),
        cost_metrics(references),
        before,
        loggers=list(loggers) or [BaseLogger()],
    )
    run = Run(name, make_strategy(evaluator=evaluator))
    for experience in benchmark.train_stream:
        before.capacity = before.owners = None
        run.strategy.train(experience)
        left = remaining_experiences(run.strategy, benchmark.test_stream)
        results = run.strategy.eval(left) if left else {}
        if not left:  # nothing was evaluated, and what the last evaluation found is not of now
            difference.reset()
        _note_unlearnings(run, references, int(experience.task_label))
        run.observations.append(_observation(run, references, experience, results, matrix, difference, before))
        progress(f"{name}: task {experience.task_label}")
    return run


class _Before(PluginMetric):
    """Capacity and owners before the first unlearning since they were last set to None; emits nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity: float | None = None
        self.owners: Shares | None = None

    def before_unlearning(self, strategy: Any) -> None:
        if self.owners is None:
            self.capacity, self.owners = network_capacity(strategy), owners_by_layer(strategy.model)

    def result(self, strategy: Any = None) -> None: ...

    def reset(self, strategy: Any = None) -> None: ...


def _note_unlearnings(run: Run, references: References, task: int) -> None:
    plugin = unlearning_of(run.strategy)
    for record in plugin.records[len(run.records) :]:
        run.records.append({key: value for key, value in asdict(record).items() if key not in ("seconds", "time")})
        run.timings.append(Timing(task, record.seconds, references.seconds(record.remaining)))


def _observation(
    run: Run,
    references: References,
    experience: Any,
    results: dict[str, Any],
    matrix: AccuracyMatrix,
    difference: AccuracyDifference,
    before: _Before,
) -> Observation:
    plugin, model = unlearning_of(run.strategy), run.strategy.model
    ledger = plugin.ledger
    known = run.observations[-1].unlearned if run.observations else ()
    phase = "/eval_phase/test_stream"

    def by_task(metric: str) -> dict[int, float]:
        found = {t: results.get(f"{metric}{phase}/Task{t:03d}") for t in ledger.unlearned}
        return {t: value for t, value in found.items() if value is not None}

    def means(*kinds: str) -> dict[str, float]:
        names = {key.removesuffix(phase) for key in results if key.startswith(kinds) and key.endswith(phase)}
        names = {name for name in names if not name.endswith("_tasks")}  # those count what a mean covers
        return {name: results[f"{name}{phase}"] for name in sorted(names)} if ledger.unlearned else {}

    jsd = means("JSD_")
    masks = {t: model.binary_mask(t) for t in model.masks} if isinstance(model, TaskMaskedModel) else None
    return Observation(
        task=int(experience.task_label),
        unlearned_now=tuple(t for t in ledger.unlearned if t not in known),
        remaining=ledger.remaining,
        unlearned=ledger.unlearned,
        accuracy={t: results[f"Top1_Acc_Exp{phase}/Task{t:03d}/Exp{t:03d}"] for t in ledger.remaining},
        unlearned_accuracy=by_task("UnlearnedAccuracy"),
        reference_unlearned_accuracy=means("UnlearnedAccuracy_reference").get("UnlearnedAccuracy_reference"),
        reference_unlearned=by_task("UnlearnedAccuracy_reference"),
        chance={t: 1 / len(references.train_experience(t).classes_in_this_experience) for t in ledger.unlearned},
        relapse=by_task("Relapse"),
        relapse_reference=by_task("Relapse_reference"),
        few_shot=by_task("FewShot"),
        few_shot_reference=by_task("FewShot_reference"),
        membership=by_task("Membership"),
        membership_reference=by_task("Membership_reference"),
        jsd=jsd,
        jsd_by_task={name: by_task(name) for name in jsd},
        distances=means("Euclidean_", "Cosine_", "CKA_"),
        accuracy_difference=_mean([*difference.differences.get("main", {}).values()]),
        accuracy_difference_control=_mean([*difference.differences.get("heads", {}).values()]),
        full_accuracy=difference.accuracies.get("full", {}),
        reference_accuracy=difference.accuracies.get("reference", {}),
        average_forgetting=forgetting(matrix.rows) if ledger.remaining else None,
        backward_transfer=backward_transfer(matrix.rows) if ledger.remaining else None,
        capacity=network_capacity(run.strategy),
        capacity_before=before.capacity,
        overlap=None if masks is None else {"tasks": list(masks), "shares": overlap_matrix(masks).tolist()},
        owners=owners_by_layer(model),
        owners_before=before.owners,
        trajectory_bytes=trajectory_bytes(run.strategy),
        claim=plugin.records[-1].claim if plugin.records else None,
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
