"""Plans of runs with a store: number of trainings, number of stored results, and estimated time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.audit.words import seconds_in_words, wrapped
from avalanche_amnesia.evaluation.references import Expected, References
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.text_table import text_table

_GROUPS = {"full": "full runs", "same": "references", "order": "floors", "seed": "floors"}


@dataclass(frozen=True)
class PlannedRuns:
    """Number of trainings of a group of runs: all, shared with earlier groups, and already stored."""

    what: str
    trainings: int
    shared: int
    there: int

    @property
    def to_compute(self) -> int:
        """Number of trainings left to do."""
        return self.trainings - self.shared - self.there


@dataclass(frozen=True)
class RunPlan:
    """Planned runs by group, and estimated seconds, by the store's mean training time (None if the store is empty)."""

    runs: tuple[PlannedRuns, ...]
    seconds: float | None

    @property
    def summary(self) -> str:
        """One sentence with the number of trainings left to do and their estimated time."""
        trainings, left = sum(r.trainings for r in self.runs), sum(r.to_compute for r in self.runs)
        if not left:
            return f"Nothing is left to train: all of {trainings} trainings are there, or shared."
        known = "how long they take is not known until one is in the store"
        if self.seconds is not None:
            known = f"about {seconds_in_words(self.seconds)}, one after another"
        return f"{left} of {trainings} trainings are left to do; {known}."

    def __str__(self) -> str:
        rows = [(r.what, *map(str, (r.trainings, r.shared, r.there, r.to_compute))) for r in self.runs]
        table = text_table(("", "trainings", "shared", "there", "to compute"), rows)
        return "\n".join([*wrapped(self.summary), table])


def plan_runs(make_strategy: Callable[..., Any], benchmark: Any, store: RunStore) -> RunPlan:
    """Return the plan for a stream with requests: main run, model that never unlearns, reference per evaluation."""
    main = store.run(make_strategy(evaluator=EvaluationPlugin(loggers=[BaseLogger()])))
    beside = reference_paths(make_strategy, benchmark, store, ("full", "same"))
    return plan_paths({"main run": [main.keys_of(benchmark.train_stream)], **beside}, store)


def reference_paths(
    make_strategy: Callable[..., Any], benchmark: Any, store: RunStore, kinds: Iterable[Expected]
) -> dict[str, list[list[str]]]:
    """Return group → paths to all models that the metrics need; a path is a list of keys of states in the store."""
    paths: dict[str, list[list[str]]] = {}
    for kind in kinds:
        references = References(make_strategy, benchmark)
        references.expect(kind)
        run, of_group = None, paths.setdefault(_GROUPS[kind], [])
        for variant, tasks in references.expected():
            run = run or store.run(references.fresh_strategy(variant))
            of_group.append(run.keys_of([references.train_experience(task) for task in tasks]))
    return paths


def plan_paths(
    paths: Mapping[str, Iterable[Sequence[str]]], store: RunStore, beside: Sequence[PlannedRuns] = ()
) -> RunPlan:
    """Return the plan for ``paths`` (group → lists of keys of states in a store), with each state counted once."""
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
