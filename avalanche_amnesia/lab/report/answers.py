"""Answers in plain words: what a strategy forgot, whether it really did, and what that cost the other tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from avalanche_amnesia.lab.report.evidence import Evidence, evidence_of
from avalanche_amnesia.lab.report.measures import capacity_before, mean_accuracy
from avalanche_amnesia.lab.report.reading import Entry, Moment, number, spread
from avalanche_amnesia.lab.report.wording import listed, over_seeds, percent, points, seconds, share, tasks


@dataclass(frozen=True)
class Answer:
    """Answers for one strategy."""

    name: str
    verdict: str
    headline: str
    forgotten: str
    really: str
    evidence: Sequence[Evidence]
    cost: Sequence[str]


def answer(entry: Entry) -> Answer:
    """Answer the three questions for one strategy, from the end of its stream."""
    evidence = list(evidence_of(entry)) if entry.unlearned else []
    verdict, headline, really = _verdict(entry, evidence)
    return Answer(entry.name, verdict, headline, _forgotten(entry), really, evidence, list(_cost(entry)))


def claim(entry: Entry) -> str:
    """Claim of all records of a strategy together: ``exact`` only if each does; ``–`` without records."""
    claims = {record["plan"]["claim"] for run in entry.runs for record in run.records if record.get("plan")}
    claims |= {moment.claim for run in entry.runs for moment in run.moments if moment.claim}
    return "exact" if claims == {"exact"} else "approximate" if claims else "–"


def _forgotten(entry: Entry) -> str:
    if not entry.requests:
        return "Nothing: no task was requested."
    requests = "; ".join(f"{tasks(each.unlearned_now)} after task {each.task}" for each in entry.requests.values())
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
