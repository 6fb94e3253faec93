"""Plans of runs with a store: number of trainings, number of stored results, and estimated time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from avalanche_amnesia.audit.words import seconds_in_words
from avalanche_amnesia.evaluation.references import Expected, References
from avalanche_amnesia.lab.runs.store import RunStore, StoredRun


@dataclass(frozen=True)
class RunPlan:
    """Cost of planned runs: numbers of trainings needed, found in the store and left to do, and the estimated time.

    Attributes:
        trainings: all trainings, counted once per model that needs the training.
        stored: states of trainings in the store.
        to_compute: trainings left to do.
        seconds: their estimated time, by the store's mean training time; None if the store is empty.
    """

    trainings: int
    stored: int
    to_compute: int
    seconds: float | None

    def __str__(self) -> str:
        if not self.to_compute:
            return f"Nothing is left to train: all of {self.trainings} trainings are there, or shared."
        known = "how long they take is not known until one is in the store"
        if self.seconds is not None:
            known = f"about {seconds_in_words(self.seconds)}, one after another"
        told = f"{self.to_compute} of {self.trainings} trainings are left to do; {known}."
        return f"{told} Of the others, {self.stored} are in the store, and the rest is shared."


def reference_paths(
    make_strategy: Callable[..., Any], benchmark: Any, store: RunStore, kinds: Iterable[Expected]
) -> list[list[str]]:
    """Return, without training, the store's keys of each reference model's states, in training order."""
    references, runs = References(make_strategy, benchmark), dict[Expected, StoredRun]()
    references.expect(*kinds)
    paths = []
    for variant, tasks in references.expected():
        if variant not in runs:
            runs[variant] = store.run(references.fresh_strategy(variant))
        paths.append(runs[variant].keys_of([references.train_experience(task) for task in tasks]))
    return paths


def plan_paths(paths: Iterable[Sequence[str]], store: RunStore, further: int = 0) -> RunPlan:
    """Plan the trainings of ``paths`` (lists of state keys): stored states are skipped, ``further`` trainings added."""
    keys = [key for path in paths for key in path]
    there = sum(map(store.has, set(keys)))
    left = len(set(keys)) - there + further
    trained = [node.seconds for node in store.nodes() if node.step.startswith("train")]
    return RunPlan(len(keys) + further, there, left, left * fmean(trained) if trained else (None if left else 0.0))
