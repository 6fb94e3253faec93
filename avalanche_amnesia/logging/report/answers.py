"""Answers in plain words: what a strategy forgot, whether it really did, and what that cost the other tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from avalanche_amnesia.logging.report.reading import Entry, Event, Spread, mean_of
from avalanche_amnesia.logging.report.wording import bits, listed, over_seeds, percent, points, seconds, share, tasks

SAME = 0.05
"""Accuracies and areas that differ by less count as the same: a test set of 100 samples varies by as much."""

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
    """What all records of a strategy claim together: ``exact`` only if each does; ``–`` without records."""
    claims = {record["plan"]["claim"] for run in entry.runs for record in run.records if record.get("plan")}
    claims |= {event["claim"] for run in entry.runs for event in run.events if event.get("claim")}
    return "exact" if claims == {"exact"} else "approximate" if claims else "–"


def jsd_reading(value: float, floors: Sequence[float]) -> tuple[Finding, str]:
    """What a JSD says beside its floors.

    Args:
        value: the JSD.
        floors: those that were measured.
    """
    if not floors:
        return "open", "no floor was measured, so that it says nothing"
    if value <= min(floors):
        return "clear", "at or below its floor: can't be told from retraining"
    if value <= max(floors):
        return "open", "between its floors: decides nothing"
    return "trace", "above its floors: further away than retraining ever came"


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
        return "trace", "approximate: traces found", f"{start}Traces are found by {listed(traces)}."
    if clear:
        words = f"{start}No trace is found by {listed(clear)}; a stronger attack may find more."
        return "clear", "approximate: no trace found", words
    return "open", "approximate: undecided", f"{start}No check that was made decides it."


def _evidence(entry: Entry) -> Iterator[Evidence]:
    head = entry.spread(mean_of("unlearned_accuracy"))
    reference = entry.spread(lambda event: event.get("reference_unlearned_accuracy"))
    chance = entry.spread(mean_of("chance", among="unlearned_accuracy"))
    yield from _against(
        "the old head",
        head,
        reference,
        "The tasks' old classifier still reads {here}; put on the retrained model {there}"
        + (f"; chance is {percent(chance.mean)}" if chance else ""),
    )
    yield from _against(
        "relapse",
        entry.spread(mean_of("relapse")),
        entry.spread(mean_of("relapse_reference")),
        "A new linear classifier on the features reaches {here}; on the retrained model's {there}",
    )
    yield from _against(
        "membership",
        entry.spread(mean_of("membership")),
        entry.spread(mean_of("membership_reference")),
        "Guessing which samples were trained on succeeds with AUC {here}; on the retrained model {there}; "
        "0.5 is guessing",
        share_=True,
    )
    distance = entry.spread(jsd_of(entry, ""))
    if distance is not None:
        floors = {name: entry.spread(jsd_of(entry, f"_floor_{name}")) for name in ("order", "seed")}
        finding, words = jsd_reading(distance.mean, [floor.mean for floor in floors.values() if floor])
        told = {"order": "another data order makes", "seed": "another seed"}
        beside = ", ".join(f"{told[name]} {over_seeds(floor, bits)}" for name, floor in floors.items() if floor)
        where = f" ({beside})" if beside else ""
        yield Evidence(finding, "JSD", f"JSD of the features is {over_seeds(distance, bits)} bit{where}: {words}.")


def jsd_name(entry: Entry) -> str | None:
    """The JSD that is charted: through the unlearned tasks' own masks where it was measured, else the first one."""
    names = sorted(
        {name for run in entry.runs for event in run.events for name in event.get("jsd") or {} if "_floor" not in name}
    )
    return "JSD_own" if "JSD_own" in names else names[0] if names else None


def jsd_of(entry: Entry, suffix: str) -> Callable[[Event], float | None]:
    """What reads a strategy's JSD, or with a suffix one of its floors, from an event."""
    name = f"{jsd_name(entry)}{suffix}"
    return lambda event: (event.get("jsd") or {}).get(name)


def _against(
    check: str, here: Spread | None, there: Spread | None, words: str, *, share_: bool = False
) -> Iterator[Evidence]:
    """A reading of the model against the same on the retrained one."""
    if here is None:
        return
    unit = share if share_ else percent
    told = words.format(here=over_seeds(here, unit), there="not measured" if there is None else over_seeds(there, unit))
    if there is None:
        yield Evidence("open", check, f"{told}.")
    elif here.mean > there.mean + SAME:
        yield Evidence("trace", check, f"{told}: more than without the tasks.")
    else:
        yield Evidence("clear", check, f"{told}: no more than without the tasks.")


def _cost(entry: Entry) -> Iterator[str]:
    remaining = entry.first.last.get("remaining") or list(entry.first.last.get("accuracy") or {})
    accuracy = entry.spread(mean_of("accuracy"))
    if accuracy is not None:
        yield f"{tasks(remaining).capitalize()} remain, at {over_seeds(accuracy, percent)} accuracy."
    difference = entry.spread(lambda event: event.get("accuracy_difference"))
    if difference is not None:
        control = entry.spread(lambda event: event.get("accuracy_difference_control"))
        beside = "" if control is None else f" (control: {over_seeds(control, points)})"
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
