"""Train on a stream with unlearning requests, and log all metrics of the report after every task."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia import evaluation
from avalanche_amnesia.contrib import metrics
from avalanche_amnesia.evaluation.bases import Floor
from avalanche_amnesia.lab.logging.json_lines import JSONLogger
from avalanche_amnesia.lab.report.reading import read_run
from avalanche_amnesia.lab.report.verdicts import verdict_of
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.logging.run_logger import RunLogger
from avalanche_amnesia.saving.files import replace_file
from avalanche_amnesia.training import remaining_experiences

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
) -> Any:
    """Train a strategy on a benchmark with unlearning requests, and log every metric of the report.

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

    Returns:
        The strategy at the end of the run.
    """
    references = evaluation.References(make_strategy, benchmark, store=store or RunStore())
    measured = metrics_of(benchmark, references, noise_floor)
    with TemporaryDirectory() as place:
        with JSONLogger(place, name=name, config=settings, pictures=False) as log:
            strategy = make_strategy(evaluator=EvaluationPlugin(*measured, loggers=[log, *loggers]))
            for experience in benchmark.train_stream:
                strategy.train(experience)
                if left := remaining_experiences(strategy, benchmark.test_stream):
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


def metrics_of(benchmark: Any, references: evaluation.References, floors: Sequence[Floor]) -> list[PluginMetric[Any]]:
    """Return Avalanche metric plugins for all metrics of the report page."""
    requests = [request for each in benchmark.train_stream for request in getattr(each, "requests", ())]
    of_samples = any(request.is_partial for request in requests)
    return [
        *(metrics.forgotten_samples_metrics(benchmark, references) if of_samples else ()),
        *accuracy_metrics(experience=True),
        *evaluation.accuracy_matrix_metrics(),
        *evaluation.accuracy_difference_metrics(references, controls=("heads", "reference")),
        *evaluation.jsd_metrics(references, noise_floor=floors),
        *metrics.distance_metrics(references, noise_floor=floors),
        *evaluation.unlearned_accuracy_metrics(benchmark, references),
        *metrics.relapse_metrics(benchmark, references),
        *metrics.few_shot_metrics(benchmark, references),
        *metrics.membership_metrics(benchmark, references),
        *evaluation.capacity_metrics(),
        *metrics.capacity_pictures_metrics(),
        *metrics.owners_metrics(),
        *metrics.mask_overlap_metrics(),
        *metrics.cost_metrics(references),
    ]
