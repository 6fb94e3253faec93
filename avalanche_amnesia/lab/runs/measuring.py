"""Run a stream with requests, evaluate all metrics of the report after every task, and log them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.contrib.metrics.cost import cost_metrics
from avalanche_amnesia.contrib.metrics.distances import distance_metrics
from avalanche_amnesia.contrib.metrics.mask_use import capacity_pictures_metrics, mask_overlap_metrics, owners_metrics
from avalanche_amnesia.contrib.metrics.membership import forgotten_samples_metrics, membership_metrics
from avalanche_amnesia.contrib.metrics.relapse import few_shot_metrics, relapse_metrics
from avalanche_amnesia.evaluation.accuracy_difference import accuracy_difference_metrics
from avalanche_amnesia.evaluation.accuracy_matrix import accuracy_matrix_metrics
from avalanche_amnesia.evaluation.bases import Floor
from avalanche_amnesia.evaluation.capacity import capacity_metrics
from avalanche_amnesia.evaluation.jsd import jsd_metrics
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.evaluation.unlearned_accuracy import unlearned_accuracy_metrics
from avalanche_amnesia.lab.logging.json_lines import JSONLogger
from avalanche_amnesia.lab.report.reading import read_run
from avalanche_amnesia.lab.report.verdicts import verdict_of
from avalanche_amnesia.lab.runs.reference_workers import ReferenceWorkers
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.logging.run_logger import RunLogger
from avalanche_amnesia.saving.files import replace_file
from avalanche_amnesia.training.host.lookup import remaining_experiences

VERDICT = "Verdict"
"""Name of a run's verdict in its log and at W&B."""


def measure_run(
    name: str,
    make_strategy: Callable[..., Any],
    benchmark: Any,
    folder: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    noise_floor: Sequence[Any] = ("order", "seed"),
    loggers: Sequence[BaseLogger] = (),
    progress: Callable[[str], None] = lambda step: None,
    store: Any = None,
    workers: int = 0,
) -> Any:
    """Train a strategy on a benchmark with requests, and log every metric of the report.

    Args:
        name: name of the run.
        make_strategy: function that builds strategies, as for :class:`References`.
        benchmark: benchmark from ``with_unlearning``.
        folder: folder for the log (``run.jsonl``), which :func:`~avalanche_amnesia.lab.report.read_run` reads. The log
            is written at the end of the run and replaces an earlier one.
        settings: plain values; runs with settings that differ only in ``seed`` are reported as one.
        noise_floor: noise floors to measure.
        loggers: additional Avalanche loggers; this package's loggers also receive the run's verdict.
        progress: called with a short text after every task.
        store: a :class:`RunStore` for the references; by default a temporary one.
        workers: number of processes that train references during the run (:class:`ReferenceWorkers`).

    Returns:
        The strategy at the end of the run.
    """
    ahead = ReferenceWorkers(workers) if workers else None
    references = References(make_strategy, benchmark, store=store or RunStore(), workers=ahead)
    metrics = metrics_of(benchmark, references, noise_floor)
    with TemporaryDirectory() as place:
        with JSONLogger(place, name=name, config=settings, pictures=False) as log:
            strategy = make_strategy(evaluator=EvaluationPlugin(*metrics, loggers=[log, *loggers]))
            for experience in benchmark.train_stream:
                strategy.train(experience)
                left = remaining_experiences(strategy, benchmark.test_stream)
                if left:
                    strategy.eval(left)
                else:
                    log.log_events()  # no task remains to be evaluated
                progress(f"{name}: task {experience.task_label}")
            verdict = str(verdict_of([read_run(place)]))
            for logger in (log, *loggers):
                if isinstance(logger, RunLogger):
                    logger.log_values({VERDICT: verdict})
        for file in sorted(path for path in Path(place).rglob("*") if path.is_file()):  # records first, the log last
            kept = Path(folder) / file.relative_to(place)
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept, file.read_bytes())
    return strategy


def metrics_of(benchmark: Any, references: References, floors: Sequence[Floor]) -> list[PluginMetric[Any]]:
    """Return Avalanche metric plugins for all metrics of the report page."""
    requests = [request for each in benchmark.train_stream for request in getattr(each, "requests", ())]
    of_samples = any(request.is_partial for request in requests)
    return [
        *(forgotten_samples_metrics(benchmark, references) if of_samples else ()),
        *accuracy_metrics(experience=True),
        *accuracy_matrix_metrics(),
        *accuracy_difference_metrics(references, controls=("heads", "reference")),
        *jsd_metrics(references, noise_floor=floors),
        *distance_metrics(references, noise_floor=floors),
        *unlearned_accuracy_metrics(benchmark, references),
        *relapse_metrics(benchmark, references),
        *few_shot_metrics(benchmark, references),
        *membership_metrics(benchmark, references),
        *capacity_metrics(),
        *capacity_pictures_metrics(),
        *owners_metrics(),
        *mask_overlap_metrics(),
        *cost_metrics(references),
    ]
