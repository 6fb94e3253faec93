"""Verdicts: what all tests of the forgetting say together, in the same words wherever a run is reported."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from avalanche_amnesia.contrib.metrics.statistics import paired_test
from avalanche_amnesia.evaluation.resolution import RESOLUTION
from avalanche_amnesia.lab.report.measures import JSD, KEPT, READINGS, Reading, jsd_names
from avalanche_amnesia.lab.report.reading import Entry, Run, Spread, spread
from avalanche_amnesia.lab.report.wording import listed, tasks

FAR = 8
"""Tolerances: a mean that exceeds the retrained model's by more is a trace, however few tasks and seeds there are. Far,
as an old head reads anything around chance in a network that it does not know (.18 to .75 of two classes)."""
FEWEST = 3
"""Pairs of readings; fewer can't tell chance from a trace."""

Finding = Literal["clear", "possible", "trace", "weak"]
Kind = Literal["exact", "conditional", "clear", "possible", "trace", "weak", "nothing"]

WORDS: dict[Kind, str] = {
    "exact": "exact",
    "conditional": "exact if repeatable",
    "clear": "no trace found",
    "possible": "undecided: a possible trace",
    "trace": "trace found",
    "weak": "undecided: tests too weak",
    "nothing": "nothing is unlearned",
}
FINDINGS: dict[Finding, str] = {
    "clear": "no trace",
    "possible": "possible trace",
    "trace": "trace",
    "weak": "too weak",
}
_GRAVEST: Sequence[Finding] = ("trace", "possible", "weak", "clear")


class Pair(NamedTuple):
    """A reading of a task, or of all of them, and the same on the retrained model."""

    task: int | None
    here: float
    there: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        reading: that was compared.
        finding: ``trace``; ``possible``: a reading exceeds the retrained model's by more than its tolerance, and chance
            is not ruled out; ``weak``: the test could not have found a trace; ``clear``: it could, and did not.
        why: the finding's reason, where the numbers alone do not say it.
        here: of the model, over seeds.
        there: of the retrained model, over seeds.
        pairs: readings of a task and seed that were compared.
        at_most: by how much the model exceeds the retrained one at most, with 95 % confidence; None for a single pair.
    """

    reading: Reading
    finding: Finding
    why: str = ""
    here: Spread | None = None
    there: Spread | None = None
    pairs: int = 0
    at_most: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Verdict on all runs of a strategy, and the outcomes that it rests on."""

    kind: Kind
    claim: str
    outcomes: Sequence[Outcome]
    beside: str = ""
    """What else is to be known of its runs: that they obey nothing, or have not ended."""

    def __str__(self) -> str:
        return WORDS[self.kind]

    @property
    def why(self) -> str:
        """Reason of the verdict, in a few words."""
        return "; ".join(words for words in (self._reason, self.beside) if words)

    @property
    def _reason(self) -> str:
        if self.kind == "nothing":
            return ""
        if self.kind in ("exact", "conditional"):
            tested = any(outcome.pairs for outcome in self.outcomes)
            condition = "" if self.kind == "exact" else ", if the parts named in the records are repeatable"
            return f"by construction{condition}, and {'no test contradicts it' if tested else 'not tested'}"
        deciding = listed([outcome.reading.check for outcome in self.outcomes if outcome.finding == self.kind])
        if self.kind == "clear":
            return f"{deciding} agree"
        against = "" if self.claim == "approximate" else "against its claim to be exact, "
        return f"{against if self.claim else ''}by {deciding}"


def verdict_of(runs: Sequence[Run]) -> Verdict:
    """Verdict on runs of one strategy, a run per seed, at the end of their streams.

    ``exact`` is claimed by all records and contradicted by no test: not even by a reading within its tolerance that
    is not the retrained model's own, as equal bits read the same. A trace that one test finds is a trace, and one that
    it can't rule out leaves all undecided. No trace is found where every test could have found one, and did not.
    """
    said, beside = claim_of(runs), "; ".join(_beside(runs))
    if not any(run.last.unlearned or run.last.parts for run in runs):  # nothing was asked for, or it was learned again
        return Verdict("nothing", said, (), beside)
    by_construction: dict[str, Kind] = {"exact": "exact", "conditional": "conditional"}
    outcomes = list(_outcomes(runs, exact=said in by_construction))
    kind: Kind = _gravest(outcomes).finding
    kind = by_construction.get(said, kind) if kind in ("weak", "clear") else kind
    return Verdict(kind, said, outcomes, beside)


def claim_of(runs: Sequence[Run]) -> str:
    """Return the weakest claim of all records; empty without records, or if no request was obeyed."""
    claims = {record["plan"]["claim"] for run in runs for record in run.records if record.get("plan")}
    claims |= {moment.claim for run in runs for moment in run.moments if moment.claim}
    if not claims or not any(run.obeys for run in runs):
        return ""
    return next(claim for claim in ("approximate", "conditional", "exact") if claim in claims)


def _beside(runs: Sequence[Run]) -> Iterator[str]:
    if not any(run.obeys for run in runs):
        yield "obeys no request"
    longest = max(len(run.moments) for run in runs)
    end = next(run.last.task for run in runs if len(run.moments) == longest)
    missing = sum(run.unrecorded for run in runs)
    if missing:
        yield f"{missing} {'record is' if missing == 1 else 'records are'} missing"
    for run in runs:
        if not run.ended or (len(run.moments) < longest and run.last.task != end):
            yield f"{run.of_seed} stopped after task {run.last.task}"


def _outcomes(runs: Sequence[Run], exact: bool) -> Iterator[Outcome]:
    """Outcomes of the tests of whole tasks where some are gone, and of samples where some are; of several JSDs one."""
    whole, parts = any(run.last.unlearned for run in runs), any(run.last.parts for run in runs)
    tests = [reading for reading in READINGS if (parts if reading.of_samples else whole)]
    yield from (_outcome(reading, runs, exact) for reading in tests)
    if whole:
        shown, *others = dict.fromkeys(name for run in runs for name in jsd_names(run.last)) or [JSD.metric]
        through = [_outcome(replace(JSD, metric=name), runs, exact) for name in others]
        yield _gravest(
            [
                _outcome(replace(JSD, metric=shown), runs, exact),
                *(replace(each, why=f"{each.reading.metric}: {each.why or 'beyond both floors'}") for each in through),
            ]
        )
    if exact and _unequal(KEPT, runs):
        yield _outcome(KEPT, runs, exact)


def _gravest(outcomes: Sequence[Outcome]) -> Outcome:
    return min(outcomes, key=lambda outcome: _GRAVEST.index(outcome.finding))


def _outcome(reading: Reading, runs: Sequence[Run], exact: bool) -> Outcome:
    found = _compared(reading, runs)
    if exact and found.finding in ("clear", "weak") and _unequal(reading, runs):
        return replace(found, finding="possible", why="not equal to the retrained model")
    return found


def _unequal(reading: Reading, runs: Sequence[Run]) -> bool:
    """Tell whether a reading is not that of a model with the retrained one's bits."""
    if reading.in_floors:  # of the JSD itself, which equal bits have none of
        return any(value >= RESOLUTION for run in runs for value in run.last.numbers.get(reading.metric, {}).values())
    return any(abs(pair.here - pair.there) >= RESOLUTION for run in runs for pair in _pairs(reading, run))


def _compared(reading: Reading, runs: Sequence[Run]) -> Outcome:
    """Compare a reading with the same on the retrained model, task by task and seed by seed."""
    here, there = (spread(run.last.number(name) for run in runs) for name in (reading.metric, reading.compared))
    pairs = [pair for run in runs for pair in _pairs(reading, run)]

    ours, theirs = [pair.here for pair in pairs], [pair.there for pair in pairs]
    low, high = _bounds(ours, theirs)

    def found(finding: Finding, why: str = "") -> Outcome:
        return Outcome(reading, finding, why, here, there, len(pairs), high if math.isfinite(high) else None)

    if here is None:
        return found("weak", "not measured")
    if there is None or not pairs:
        return found("weak", "no order floor" if reading.in_floors else "not measured on the retrained model")
    unread = sorted({task for run in runs for task in _unread(reading, run)})
    if reading.in_floors and max(ours) < RESOLUTION and not unread:
        return found("clear")
    mean, tolerance = fmean(ours) - fmean(theirs), _tolerance(reading, fmean(theirs))
    if mean > tolerance:
        if mean <= FAR * tolerance and low <= 0:
            return found("possible", f"{len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} can't rule out chance")
        wider = spread(run.last.number(f"{reading.metric}{reading.wider}") for run in runs)
        if reading.wider and (wider is None or here.mean <= wider.mean):
            return found("possible", "within another seed's floor" if wider else "no seed floor was measured")
        return found("trace")
    # One task or one seed by itself varies more than the mean of all: twice the tolerance.
    by_task: dict[int | None, list[Pair]] = {}
    for pair in pairs:
        by_task.setdefault(pair.task, []).append(pair)
    far = [task for task, of in by_task.items() if task is not None and _exceeds(reading, of)]
    if far:
        return found("possible", f"on {tasks(far)}")
    alone = [run.of_seed for run in runs if _exceeds(reading, _pairs(reading, run))]
    if alone:
        return found("possible", f"in {listed(alone)}")
    if unread:
        return found("weak", f"not measured on {tasks(unread)}")
    if fmean(theirs) + tolerance > reading.axis.highest:
        return found("weak", "the retrained model leaves no room above it")
    if len(pairs) < FEWEST or high > tolerance:
        return found("weak", "too few tasks and seeds")
    return found("clear")


def _pairs(reading: Reading, run: Run) -> list[Pair]:
    """Pairs of the tasks; where no task has both readings, that of all tasks."""
    here, there = (run.last.numbers.get(name, {}) for name in (reading.metric, reading.compared))
    shared = [task for task in here if task in there]
    return [Pair(task, here[task], there[task]) for task in shared if task is not None or shared == [None]]


def _unread(reading: Reading, run: Run) -> set[int]:
    """Forgotten tasks that a run has no reading of."""
    read = {pair.task for pair in _pairs(reading, run)}
    return set() if reading.of_samples or None in read else set(run.last.unlearned) - read


def _exceeds(reading: Reading, pairs: Sequence[Pair]) -> bool:
    """Tell whether a part of the pairs exceeds twice the tolerance."""
    if not pairs:
        return False
    ours, theirs = fmean(pair.here for pair in pairs), fmean(pair.there for pair in pairs)
    return ours - theirs > 2 * _tolerance(reading, theirs)


def _tolerance(reading: Reading, there: float) -> float:
    return reading.tolerance * (there if reading.in_floors else 1.0)


def _bounds(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """One-sided bounds of the mean difference, 95 % each, by Student's t over the pairs."""
    if len(ours) < 2:
        return -math.inf, math.inf
    test = paired_test(ours, theirs, confidence=0.9)
    return test.interval or (test.mean_difference, test.mean_difference)


def verdicts_as_text(entries: Sequence[Entry]) -> str:
    """A line per strategy: its name and the verdict on its runs."""
    width = max(len(entry.name) for entry in entries)
    found = [(entry.name, verdict_of(entry.runs)) for entry in entries]
    return "\n".join(f"{name:{width}}  {one}{f' ({one.beside})' * bool(one.beside)}" for name, one in found)
