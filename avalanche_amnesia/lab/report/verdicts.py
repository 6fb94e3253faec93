"""Verdicts: what all tests of the forgetting say together, in the same words wherever a run is reported."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from avalanche_amnesia.contrib.metrics.paired import paired_test
from avalanche_amnesia.evaluation.resolution import RESOLUTION
from avalanche_amnesia.lab.report.measures import JSD, READINGS, Reading, jsd_name
from avalanche_amnesia.lab.report.reading import Moment, Run, Spread, spread
from avalanche_amnesia.lab.report.wording import listed, tasks

FAR = 8
"""Tolerances: a mean that exceeds the retrained model's by more is a trace, however few tasks and seeds there are. Far,
as an old head reads anything around chance in a network that it does not know (.18 to .75 of two classes)."""
FEWEST = 3
"""Pairs of readings; fewer can't tell chance from a trace."""

Finding = Literal["clear", "possible", "trace", "weak"]
Kind = Literal["exact", "clear", "possible", "trace", "weak", "nothing"]

WORDS: dict[Kind, str] = {
    "exact": "exact",
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

    def __str__(self) -> str:
        return WORDS[self.kind]

    @property
    def why(self) -> str:
        """Reason of the verdict, in a few words."""
        if self.kind == "nothing":
            return ""
        if self.kind == "exact":
            return "by construction, and no test contradicts it"
        deciding = listed([outcome.reading.check for outcome in self.outcomes if outcome.finding == self.kind])
        if self.kind == "clear":
            return f"{deciding} agree"
        return f"{'against its claim to be exact, ' if self.claim == 'exact' else ''}by {deciding}"


def verdict_of(runs: Sequence[Run]) -> Verdict:
    """Verdict on runs of one strategy, a run per seed, at the end of their streams.

    ``exact`` is claimed by all records and contradicted by no test. A trace that one test finds is a trace, and one
    that it can't rule out leaves all undecided. No trace is found where every test could have found one, and did not.
    """
    said = claim_of(runs)
    if not any(run.last.unlearned or run.last.parts for run in runs):  # nothing was asked for, or it was learned again
        return Verdict("nothing", said, ())
    outcomes = [_outcome(reading, runs) for reading in _tests_of(runs)]
    findings = {outcome.finding for outcome in outcomes}
    kinds: Sequence[Finding] = ("trace", "possible", "weak")
    kind: Kind = next((kind for kind in kinds if kind in findings), "clear")
    exact = said == "exact" and findings.isdisjoint(("trace", "possible"))
    return Verdict("exact" if exact else kind, said, outcomes)


def claim_of(runs: Sequence[Run]) -> str:
    """Claim of all records together: ``exact`` only if each does; ``–`` without records."""
    claims = {record["plan"]["claim"] for run in runs for record in run.records if record.get("plan")}
    claims |= {moment.claim for run in runs for moment in run.moments if moment.claim}
    return "exact" if claims == {"exact"} else "approximate" if claims else "–"


def _tests_of(runs: Sequence[Run]) -> Iterator[Reading]:
    """Tests of whole tasks where some are gone, and of samples where some are."""
    whole, parts = any(run.last.unlearned for run in runs), any(run.last.parts for run in runs)
    yield from (reading for reading in READINGS if (parts if reading.of_samples else whole))
    if whole:
        yield replace(JSD, metric=jsd_name(runs[0].last) or JSD.metric)


def _outcome(reading: Reading, runs: Sequence[Run]) -> Outcome:
    """Compare a reading with the same on the retrained model, task by task and seed by seed."""
    here, there = (
        spread(run.last.number(name) for run in runs) for name in (reading.metric, f"{reading.metric}{reading.beside}")
    )
    pairs = [pair for run in runs for pair in _pairs(reading, run.last)]

    ours, theirs = [a for _, a, _ in pairs], [b for _, _, b in pairs]
    low, high = _bounds(ours, theirs)

    def found(finding: Finding, why: str = "") -> Outcome:
        return Outcome(reading, finding, why, here, there, len(pairs), high if math.isfinite(high) else None)

    if here is None:
        return found("weak", "not measured")
    if there is None or not pairs:
        return found("weak", "not measured on the retrained model")
    if reading.in_floors and here.mean < RESOLUTION:
        return found("clear")
    mean, tolerance = fmean(ours) - fmean(theirs), _tolerance(reading, fmean(theirs))
    if mean > tolerance:
        if mean <= FAR * tolerance and low <= 0:
            return found("possible", f"{len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} can't rule out chance")
        wider = spread(run.last.number(f"{reading.metric}{reading.wider}") for run in runs)
        if reading.wider and (wider is None or here.mean <= wider.mean):
            return found("possible", "within another seed's floor" if wider else "no seed floor was measured")
        return found("trace")
    far = [task for task in dict.fromkeys(task for task, _, _ in pairs) if _exceeds(reading, task, pairs)]
    if far:
        return found("possible", f"on {tasks([task for task in far if task is not None])}")
    if fmean(theirs) + tolerance > reading.axis.highest:
        return found("weak", "the retrained model leaves no room above it")
    if len(pairs) < FEWEST or high > tolerance:
        return found("weak", "too few tasks and seeds")
    return found("clear")


def _pairs(reading: Reading, moment: Moment) -> list[tuple[int | None, float, float]]:
    """Task, its reading here and on the retrained model; without tasks that have both, those of all tasks."""
    here, there = (moment.numbers.get(name, {}) for name in (reading.metric, f"{reading.metric}{reading.beside}"))
    shared = [task for task in here if task in there]
    return [(task, here[task], there[task]) for task in shared if task is not None or shared == [None]]


def _tolerance(reading: Reading, there: float) -> float:
    return reading.tolerance * (there if reading.in_floors else 1.0)


def _exceeds(reading: Reading, task: int | None, pairs: Sequence[tuple[int | None, float, float]]) -> bool:
    """Tell whether one task alone, which varies more than their mean, exceeds twice the tolerance."""
    ours, theirs = zip(*[(a, b) for of, a, b in pairs if of == task], strict=True)
    return task is not None and fmean(ours) - fmean(theirs) > 2 * _tolerance(reading, fmean(theirs))


def _bounds(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """One-sided bounds of the mean difference, 95 % each, by Student's t over the pairs."""
    if len(ours) < 2:
        return -math.inf, math.inf
    test = paired_test(ours, theirs, confidence=0.9)
    return test.interval or (test.mean_difference, test.mean_difference)


def verdicts_as_text(named: Mapping[str, Sequence[Run]]) -> str:
    """A line per strategy: its name and the verdict on its runs."""
    width = max(map(len, named))
    return "\n".join(f"{name:{width}}  {verdict_of(runs)}" for name, runs in named.items())
