"""Evidence of the forgetting: every check that was made, and whether it finds a trace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from avalanche_amnesia.contrib.metrics.paired import paired_test
from avalanche_amnesia.lab.report.measures import READINGS, Reading, jsd_of
from avalanche_amnesia.lab.report.reading import Entry, number
from avalanche_amnesia.lab.report.wording import bits, listed, over_seeds, percent, tasks, times

SAME = 0.05
"""Accuracies and areas that differ by less count as the same: a test set of 100 samples varies by as much."""
FAR = 4 * SAME
"""A mean difference beyond it is a trace however few tasks and seeds there are."""

Finding = Literal["clear", "trace", "open"]


@dataclass(frozen=True)
class Evidence:
    """One check of the forgetting, and what it says: no trace, a trace, or neither."""

    finding: Finding
    check: str
    words: str


def evidence_of(entry: Entry) -> Iterator[Evidence]:
    """Checks that were made of the unlearned tasks, each with what it says."""
    for reading in READINGS:
        yield from _against_retrained(entry, reading)
    distance = entry.spread(jsd_of())
    if distance is not None:
        floors = {name: entry.spread(jsd_of(f"_floor_{name}")) for name in ("order", "seed")}
        order, seed = (None if floor is None else floor.mean for floor in floors.values())
        finding, words = jsd_reading(distance.mean, order, seed)
        named = {"order": "data order", "seed": "seed"}
        beside = [f"{over_seeds(floor, bits)} by {named[name]}" for name, floor in floors.items() if floor]
        where = f"; its floors {listed(beside)}" if beside else ""
        ratio = entry.spread(jsd_of("_ratio_order"))
        counted = "" if ratio is None else f" ({over_seeds(ratio, times)} its order floor)"
        yield Evidence(finding, "JSD", f"{over_seeds(distance, bits)} bit{counted}{where}: {words}.")


def jsd_reading(value: float, order: float | None, seed: float | None) -> tuple[Finding, str]:
    """Read a JSD beside its floors: finding and words; it can find a trace, and never clears."""
    floors = [floor for floor in (order, seed) if floor is not None]
    if not floors:
        return "open", "no floor was measured, so that it says nothing"
    if value > max(floors):
        return "trace", "above its floors, further away than another retraining"
    if order is None:
        return "open", "within another seed's floor, the wide one, which decides nothing"
    if value > order:
        return "open", "above its order floor and within another seed's, which decides nothing"
    return "open", "at or below its order floor, which clears nothing by itself: small residues are invisible to it"


def _against_retrained(entry: Entry, reading: Reading) -> Iterator[Evidence]:
    """A reading of the model against the same on the retrained one, by the mean over the unlearned tasks.

    A head that knows nothing of a model's features reads anything around chance. So a mean that is higher than there is
    a trace only where tasks and seeds agree (a one-sided t-test of the differences, 5 %), and undecided elsewhere; so
    is a single task that is read far better than there.
    """
    metric, words = reading.metric, reading.axis.words
    here, there = entry.spread(number(metric)), entry.spread(number(f"{metric}_reference"))
    if here is None:
        return
    chance = entry.spread(number(f"{metric}_chance"))
    read_as = reading.words.format(
        here=over_seeds(here, words), there="not measured" if there is None else over_seeds(there, words)
    )
    read_as += f", chance {percent(chance.mean)}" if chance else ""
    if there is None:
        yield Evidence("open", reading.check, f"{read_as}.")
        return
    getters = {task: (number(metric, task), number(f"{metric}_reference", task)) for task in entry.unlearned}
    means = {task: (entry.spread(ours), entry.spread(theirs)) for task, (ours, theirs) in getters.items()}
    far = [task for task, (a, b) in means.items() if a is not None and b is not None and a.mean > b.mean + 2 * SAME]
    read = [(ours(run.last), theirs(run.last)) for ours, theirs in getters.values() for run in entry.runs]
    pairs = [(a, b) for a, b in read if a is not None and b is not None]
    if here.mean > there.mean + FAR or (here.mean > there.mean + SAME and _agree(pairs)):
        yield Evidence("trace", reading.check, f"{read_as}.")
    elif here.mean > there.mean + SAME:
        yield Evidence("open", reading.check, f"{read_as}; {len(pairs)} tasks and seeds that differ too much to tell.")
    elif far:
        yield Evidence("open", reading.check, f"{read_as}; but far more on {tasks(far)}.")
    else:
        yield Evidence("clear", reading.check, f"{read_as}.")


def _agree(pairs: Sequence[tuple[float, float]]) -> bool:
    """Tell whether the first of a pair is higher by more than chance, at 5 %."""
    if len(pairs) < 2:
        return False
    test = paired_test([a for a, _ in pairs], [b for _, b in pairs])
    return test.mean_difference > 0 and (test.t_p is None or test.t_p < 0.1)  # two-sided; none where all are equal
