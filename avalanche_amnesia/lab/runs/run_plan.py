"""Plan of a stream's runs through a store: what would be trained, what is there, and roughly how long it takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.audit.words import seconds_in_words
from avalanche_amnesia.benchmarks.requests import tasks_after_each, without_requests
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.lab.runs.store import RunStore


@dataclass(frozen=True)
class PlannedRuns:
    """Trainings of a group of runs."""

    what: str
    trainings: int
    shared: int
    there: int

    @property
    def to_compute(self) -> int:
        """Trainings that are left."""
        return self.trainings - self.shared - self.there


@dataclass(frozen=True)
class RunPlan:
    """Work that a stream's runs would be.

    Attributes:
        runs: by group.
        seconds: of all trainings that are left, at the mean of those in the store; None while it has none.
    """

    runs: tuple[PlannedRuns, ...]
    seconds: float | None

    def __str__(self) -> str:
        rows = [("", "trainings", "shared", "there", "to compute")]
        rows += [(r.what, str(r.trainings), str(r.shared), str(r.there), str(r.to_compute)) for r in self.runs]
        lines = [f"{row[0]:12}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows]
        known = "unknown until one is in the store" if self.seconds is None else seconds_in_words(self.seconds)
        return "\n".join([*lines, f"time, one after another: {known}"])


def plan_runs(make_strategy: Callable[..., Any], benchmark: Any, store: RunStore) -> RunPlan:
    """Work out what a stream with requests costs, with its full model and a reference after each request.

    Args:
        make_strategy: as for :class:`~avalanche_amnesia.evaluation.References`.
        benchmark: with its requests.
        store: where the runs would be kept.
    """
    stream, alone = benchmark.train_stream, without_requests(benchmark).train_stream
    of_task = {int(experience.task_label): experience for experience in alone}
    main = store.run(make_strategy(evaluator=EvaluationPlugin(loggers=[BaseLogger()])))
    reference = store.run(References(make_strategy, benchmark).fresh_strategy())
    after_each = [remaining for _, remaining in tasks_after_each(stream)]
    after_requests = [remaining for e, remaining in zip(stream, after_each, strict=True) if e.requests]
    paths = {
        "main run": [main.keys_of(stream)],
        "full run": [reference.keys_of(alone)],
        "references": [reference.keys_of([of_task[t] for t in remaining]) for remaining in after_requests],
    }
    return plan_paths(paths, store)


def plan_paths(
    paths: Mapping[str, Iterable[Sequence[str]]], store: RunStore, beside: Sequence[PlannedRuns] = ()
) -> RunPlan:
    """Work out what is left of some paths through a store, each state counted once."""
    counted: set[str] = set()
    runs = list(beside)
    for what, of_paths in paths.items():
        keys = [key for path in of_paths for key in path]
        new = set(keys) - counted
        there = sum(store.has(key) for key in new)
        runs.append(PlannedRuns(what, len(keys), len(keys) - len(new), there))
        counted |= new
    trained = [node.seconds for node in store.nodes() if node.step.startswith("train")]
    left = sum(group.to_compute for group in runs)
    return RunPlan(tuple(runs), left * fmean(trained) if trained else (None if left else 0.0))
