"""Answers in plain words: what a strategy forgot, whether it really did, and what that cost the other tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from avalanche_amnesia.contrib.metrics.paired import paired_test
from avalanche_amnesia.evaluation.functional import distance_in_words
from avalanche_amnesia.lab.report.measures import COLUMNS, READINGS, Reading, capacity_before, jsd_of, mean_accuracy
from avalanche_amnesia.lab.report.reading import Entry, Moment, number, spread
from avalanche_amnesia.lab.report.wording import listed, over_seeds, percent, points, seconds, share, tasks, times

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


@dataclass(frozen=True)
class Answer:
    """Answers for one strategy; ``beside``: what it cost the others, in a few words, or nothing."""

    name: str
    beside: str
    verdict: str
    forgotten: str
    really: str
    evidence: Sequence[Evidence]
    cost: Sequence[str]


def answer(entry: Entry) -> Answer:
    """Answer the three questions for one strategy, from the end of its stream."""
    evidence = list(_evidence_of(entry)) if entry.requests else []
    verdict, really = _verdict(entry, evidence)
    difference = entry.spread(number("AccuracyDifference")) if entry.unlearned else None
    beside = "" if difference is None else f" (other tasks: {points(difference.mean)} of accuracy)"
    return Answer(entry.name, beside, verdict, _forgotten(entry), really, evidence, list(_cost(entry)))


def claim(entry: Entry) -> str:
    """Claim of all records of a strategy together: ``exact`` only if each does; ``–`` without records."""
    claims = {record["plan"]["claim"] for run in entry.runs for record in run.records if record.get("plan")}
    claims |= {moment.claim for run in entry.runs for moment in run.moments if moment.claim}
    return "exact" if claims == {"exact"} else "approximate" if claims else "–"


def _forgotten(entry: Entry) -> str:
    if not entry.requests:
        return "Nothing: no task was requested."
    moments = entry.requests.values()
    requests = "; ".join(f"{_gone(each.unlearned_now, each.parts_now)} after task {each.task}" for each in moments)
    whole = f"{tasks(entry.unlearned).capitalize()} of {len(entry.after)}" if entry.unlearned else "No whole task"
    return f"{whole} ({requests})."


def _gone(whole: Sequence[int], parts: Sequence[str]) -> str:
    """Tasks and samples that went: ``task 0 and 3 samples of task 1``."""
    return listed([*([tasks(whole)] if whole else []), *parts])


def _verdict(entry: Entry, evidence: Sequence[Evidence]) -> tuple[str, str]:
    if not entry.requests:
        return "nothing", "There was nothing to forget."
    if claim(entry) == "exact":
        gone = _gone(entry.unlearned, entry.parts)
        equals = f"its records claim that the model equals, bit for bit, one that never saw {gone}"
        return "exact", f"Yes, by construction: {equals}."
    traces = [item.check for item in evidence if item.finding == "trace"]
    clear = [item.check for item in evidence if item.finding == "clear"]
    start = "Not proven (its records claim only an approximation). "
    if traces:
        return "trace", f"{start}Traces are found: {listed(traces)}."
    if clear:
        undecided = [item.check for item in evidence if item.finding == "open"]
        beside = f"; {listed(undecided)} can't tell" if undecided else ""
        words = f"{start}No trace is found ({listed(clear)}){beside}; a stronger attack may find more."
        return "clear", words
    return "open", f"{start}No check that was made decides it."


def _cost(entry: Entry) -> Iterator[str]:
    accuracy = entry.spread(mean_accuracy)
    if accuracy is not None:
        yield f"{tasks(entry.first.last.remaining).capitalize()} remain, at {over_seeds(accuracy, percent)} accuracy."
    difference = entry.spread(number("AccuracyDifference"))
    if difference is not None:
        control = entry.spread(number("AccuracyDifference_control"))
        beside = "" if control is None else f" (control, only heads fitted again: {over_seeds(control, points)})"
        yield f"Against a model that never unlearned: {over_seeds(difference, points)}{beside}."
    retrained = entry.spread(_retrained)
    if retrained is not None:
        yield f"A model retrained without the forgotten tasks reaches {over_seeds(retrained, percent)}."
    unlearn, retrain = spread(cost.unlearn for cost in entry.costs), spread(cost.retrain for cost in entry.costs)
    if unlearn is not None and retrain is not None and unlearn.mean:
        yield (
            f"A request took {seconds(unlearn.mean)}, retraining {seconds(retrain.mean)}: "
            f"{retrain.mean / unlearn.mean:,.0f} times as long."
        )
    if entry.requests:
        last = max(entry.requests)
        before, after = entry.spread(capacity_before, last), entry.spread(number("Capacity"), last)
        if before is not None and after is not None:
            yield f"The last request took free capacity from {over_seeds(before, share)} to {over_seeds(after, share)}."


def _retrained(moment: Moment) -> float | None:
    """Mean accuracy of the retrained model on the remaining tasks."""
    found = moment.by_task("Accuracy_reference").values()
    return sum(found) / len(found) if found else None


# Evidence ------------------------------------------------------------------------------------------------------


def _evidence_of(entry: Entry) -> Iterator[Evidence]:
    """Checks that were made of the unlearned tasks, each with what it says."""
    for reading in READINGS:
        yield from _against_retrained(entry, reading)
    distance = entry.spread(jsd_of())
    if distance is not None:
        floors = {name: entry.spread(jsd_of(f"_floor_{name}")) for name in ("order", "seed")}
        order, seed = (None if floor is None else floor.mean for floor in floors.values())
        finding, words = jsd_reading(distance.mean, order, seed)
        named = {"order": "data order", "seed": "seed"}
        beside = [f"{over_seeds(floor, distance_in_words)} by {named[name]}" for name, floor in floors.items() if floor]
        where = f"; its floors {listed(beside)}" if beside else ""
        ratio = entry.spread(COLUMNS["ratio"].of)
        counted = "" if ratio is None else f" ({over_seeds(ratio, times)} its order floor)"
        yield Evidence(finding, "JSD", f"{over_seeds(distance, distance_in_words)} bit{counted}{where}: {words}.")


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
    """A reading of the model against the same on the retrained one, by the mean over the tasks that lost something.

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
    measured = entry.first.last.by_task(metric)
    getters = {task: (number(metric, task), number(f"{metric}_reference", task)) for task in measured}
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
