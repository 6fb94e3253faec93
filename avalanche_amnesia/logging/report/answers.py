"""Answers in plain words: what a strategy forgot, whether it really did, and what that cost the other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from scipy import stats

from avalanche_amnesia.logging.report.reading import Entry, Event, Spread, mean_of, of_task
from avalanche_amnesia.logging.report.wording import bits, listed, over_seeds, percent, points, seconds, share, tasks

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
    """Answers for one strategy.

    Attributes:
        name: of the strategy.
        verdict: ``exact``, ``clear`` (approximate, no check found a trace), ``trace``, ``open`` (approximate, nothing
            decisive was measured) or ``nothing`` (nothing was unlearned).
        headline: the verdict in a few words.
        forgotten: what was unlearned, and when.
        really: whether it was.
        evidence: the checks.
        cost: to the other tasks, a line each.
    """

    name: str
    verdict: str
    headline: str
    forgotten: str
    really: str
    evidence: Sequence[Evidence]
    cost: Sequence[str]


def answer(entry: Entry) -> Answer:
    """Answer the three questions for one strategy, from the end of its stream."""
    evidence = list(_evidence(entry)) if entry.unlearned else []
    verdict, headline, really = _verdict(entry, evidence)
    return Answer(entry.name, verdict, headline, _forgotten(entry), really, evidence, list(_cost(entry)))


def claim(entry: Entry) -> str:
    """Claim of all records of a strategy together: ``exact`` only if each does; ``–`` without records."""
    claims = {record["plan"]["claim"] for run in entry.runs for record in run.records if record.get("plan")}
    claims |= {event["claim"] for run in entry.runs for event in run.events if event.get("claim")}
    return "exact" if claims == {"exact"} else "approximate" if claims else "–"


def jsd_reading(value: float, floors: Sequence[float]) -> tuple[Finding, str]:
    """Read a JSD beside its floors: finding and words.

    Args:
        value: the JSD.
        floors: those that were measured.
    """
    if not floors:
        return "open", "no floor was measured, so that it says nothing"
    if value <= min(floors):
        return "clear", "at or below its floor, can't be told from retraining (but small residues are invisible to it)"
    if value <= max(floors):
        return "open", "between its floors, which decides nothing"
    return "trace", "above its floors, further away than another retraining"


def _forgotten(entry: Entry) -> str:
    asked = [(event["task"], event["unlearned_now"]) for event in entry.first.events if event.get("unlearned_now")]
    if not asked:
        return "Nothing: no task was requested."
    requests = "; ".join(f"{tasks(gone)} after task {after}" for after, gone in asked)
    return f"{tasks(entry.unlearned).capitalize()} of {len(entry.after)} ({requests})."


def _verdict(entry: Entry, evidence: Sequence[Evidence]) -> tuple[str, str, str]:
    if not entry.unlearned:
        return "nothing", "nothing unlearned", "There was nothing to forget."
    if claim(entry) == "exact":
        gone = tasks(entry.unlearned)
        return (
            "exact",
            "exact: provably forgotten",
            f"Yes, by construction: its records claim that the model equals, bit for bit, one that never saw {gone}.",
        )
    traces = [item.check for item in evidence if item.finding == "trace"]
    clear = [item.check for item in evidence if item.finding == "clear"]
    start = "Not proven (its records claim only an approximation). "
    if traces:
        return "trace", "approximate: traces found", f"{start}Traces are found: {listed(traces)}."
    if clear:
        undecided = [item.check for item in evidence if item.finding == "open"]
        beside = f"; {listed(undecided)} can't tell" if undecided else ""
        words = f"{start}No trace is found ({listed(clear)}){beside}; a stronger attack may find more."
        return "clear", "approximate: no trace found", words
    return "open", "approximate: undecided", f"{start}No check that was made decides it."


def _evidence(entry: Entry) -> Iterator[Evidence]:
    chance = entry.spread(mean_of("chance", among="unlearned_accuracy"))
    by_chance = f", chance {percent(chance.mean)}" if chance else ""
    yield from _against(
        entry,
        "old classifier",
        entry.spread(lambda event: event.get("reference_unlearned_accuracy")),
        ("unlearned_accuracy", "reference_unlearned"),
        f"{{here}} of the test samples, on the retrained model {{there}}{by_chance}",
        percent,
    )
    yield from _against(
        entry,
        "relapse",
        entry.spread(mean_of("relapse_reference")),
        ("relapse", "relapse_reference"),
        "a new linear classifier reaches {here}, on the retrained model {there}",
        percent,
    )
    yield from _against(
        entry,
        "membership",
        entry.spread(mean_of("membership_reference")),
        ("membership", "membership_reference"),
        "guessing which samples were trained on has AUC {here}, on the retrained model {there} (0.5 is chance)",
        share,
    )
    distance = entry.spread(jsd_of(entry, ""))
    if distance is not None:
        floors = {name: entry.spread(jsd_of(entry, f"_floor_{name}")) for name in ("order", "seed")}
        finding, words = jsd_reading(distance.mean, [floor.mean for floor in floors.values() if floor])
        told = {"order": "data order", "seed": "seed"}
        beside = [f"{over_seeds(floor, bits)} by {told[name]}" for name, floor in floors.items() if floor]
        where = f"; its floors {listed(beside)}" if beside else ""
        yield Evidence(finding, "JSD", f"{over_seeds(distance, bits)} bit{where}: {words}.")


def jsd_name(entry: Entry) -> str | None:
    """The JSD that is charted: through the unlearned tasks' own masks where it was measured, else the first one."""
    names = sorted(
        {name for run in entry.runs for event in run.events for name in event.get("jsd") or {} if "_floor" not in name}
    )
    return "JSD_own" if "JSD_own" in names else names[0] if names else None


def jsd_of(entry: Entry, suffix: str) -> Callable[[Event], float | None]:
    """Getter of a strategy's JSD, or with a suffix of one of its floors, from an event."""
    name = f"{jsd_name(entry)}{suffix}"
    return lambda event: (event.get("jsd") or {}).get(name)


def _against(
    entry: Entry,
    check: str,
    there: Spread | None,
    keys: tuple[str, str],
    words: str,
    unit: Callable[[float], str],
) -> Iterator[Evidence]:
    """A reading of the model against the same on the retrained one, by the mean over the unlearned tasks.

    A head that knows nothing of a model's features reads anything around chance. So a mean that is higher than there is
    a trace only where tasks and seeds agree (a one-sided t-test of the differences, 5 %), and undecided elsewhere; so
    is a single task that is read far better than there.
    """
    here = entry.spread(mean_of(keys[0]))
    if here is None:
        return
    told = words.format(here=over_seeds(here, unit), there="not measured" if there is None else over_seeds(there, unit))
    if there is None:
        yield Evidence("open", check, f"{told}.")
        return
    both = {task: [entry.spread(of_task(key, task)) for key in keys] for task in entry.unlearned}
    far = [task for task, (a, b) in both.items() if a is not None and b is not None and a.mean > b.mean + 2 * SAME]
    pairs = [[of_task(key, task)(run.last) for key in keys] for task in entry.unlearned for run in entry.runs]
    higher = [a - b for a, b in pairs if a is not None and b is not None]
    if here.mean > there.mean + FAR or (here.mean > there.mean + SAME and _positive(higher)):
        yield Evidence("trace", check, f"{told}.")
    elif here.mean > there.mean + SAME:
        yield Evidence("open", check, f"{told}; {len(higher)} tasks and seeds that differ too much to tell.")
    elif far:
        yield Evidence("open", check, f"{told}; but far more on {tasks(far)}.")
    else:
        yield Evidence("clear", check, f"{told}.")


def _positive(differences: Sequence[float]) -> bool:
    """Tell whether their mean is above 0 by more than chance, at 5 %."""
    if len(differences) < 2:
        return False
    error = stdev(differences) / len(differences) ** 0.5
    return fmean(differences) > error * float(stats.t.ppf(0.95, len(differences) - 1))


def _cost(entry: Entry) -> Iterator[str]:
    remaining = entry.first.last.get("remaining") or list(entry.first.last.get("accuracy") or {})
    accuracy = entry.spread(mean_of("accuracy"))
    if accuracy is not None:
        yield f"{tasks(remaining).capitalize()} remain, at {over_seeds(accuracy, percent)} accuracy."
    difference = entry.spread(lambda event: event.get("accuracy_difference"))
    if difference is not None:
        control = entry.spread(lambda event: event.get("accuracy_difference_control"))
        beside = "" if control is None else f" (control, heads fitted anew alone: {over_seeds(control, points)})"
        yield f"Against a model that never unlearned: {over_seeds(difference, points)}{beside}."
    retrained = entry.spread(mean_of("reference_accuracy", among="accuracy"))
    if retrained is not None:
        yield f"A model retrained without the forgotten tasks reaches {over_seeds(retrained, percent)}."
    unlearn = [timing["unlearn"] for run in entry.runs for timing in run.timings]
    retrain = [timing["retrain"] for run in entry.runs for timing in run.timings]
    if unlearn and sum(unlearn):
        mean_seconds = [sum(times) / len(times) for times in (unlearn, retrain)]
        yield (
            f"A request took {seconds(mean_seconds[0])}, retraining {seconds(mean_seconds[1])}: "
            f"{mean_seconds[1] / mean_seconds[0]:,.0f} times as long."
        )
    asked = [event["task"] for event in entry.first.events if event.get("unlearned_now")]
    before = entry.spread(lambda event: event.get("capacity_before"), asked[-1]) if asked else None
    after = entry.spread(lambda event: event.get("capacity"), asked[-1]) if asked else None
    if before is not None and after is not None:
        yield f"The last request took free capacity from {over_seeds(before, share)} to {over_seeds(after, share)}."
