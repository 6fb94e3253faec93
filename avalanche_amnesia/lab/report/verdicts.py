"""Verdicts on strategies: guarantees and all tests for traces of unlearned tasks, combined into one of eight."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

import numpy as np

from avalanche_amnesia.audit.words import PROVED
from avalanche_amnesia.contrib.metrics.statistics import paired_test
from avalanche_amnesia.evaluation.resolution import RESOLUTION
from avalanche_amnesia.lab.report.measures import JSD, KEPT, TRACE_TESTS, TraceTest, jsd_names
from avalanche_amnesia.lab.report.reading import Entry, Run, Spread, group_by, plan_values, spread
from avalanche_amnesia.lab.report.wording import listed, percent, tasks

FAR = 8
"""A mean more than this many tolerances above the retrained model's is a trace even with few tasks and seeds. The
number is large because an old head varies around chance on an unknown network (.18 to .75 with two classes)."""
FEWEST = 3
"""Minimum number of compared pairs of task and seed; with fewer pairs, a difference may be chance."""
LIKELY = 1e-3
"""Largest p-value of a likely trace: a test on all test samples, for too few tasks and seeds to test on these."""

Finding = Literal["clear", "possible", "likely", "trace", "weak"]
Kind = Literal["exact", "conditional", "clear", "possible", "likely", "trace", "weak", "nothing"]

WORDS: dict[Kind, str] = {
    "exact": "exact",
    "conditional": "exact if stateless",
    "clear": "no trace found",
    "possible": "undecided: a possible trace",
    "likely": "trace likely",
    "trace": "trace found",
    "weak": "undecided: tests too weak",
    "nothing": "nothing is unlearned",
}
FINDINGS: dict[Finding, str] = {
    "trace": "trace",
    "likely": "likely trace",
    "possible": "possible trace",
    "weak": "too weak",
    "clear": "no trace",
}
"""Finding → words; the gravest first."""


class Pair(NamedTuple):
    """Values of a metric on this model and on the retrained model, for one task or (``task`` None) for all tasks."""

    task: int | None
    here: float
    there: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test for traces of unlearned tasks.

    Attributes:
        test: the test.
        finding: ``trace``; ``possible``: the excess over the retrained model is above the tolerance, but may be chance;
            ``likely``: it may be chance among tasks and seeds, but not among samples; ``weak``: the test could not have
            found a trace; ``clear``: the test could have found one, but did not.
        why: reason for the finding, if the numbers do not show it.
        here: the metric of this model over seeds.
        there: the metric of the retrained model over seeds.
        pairs: number of compared pairs of task and seed.
    """

    test: TraceTest
    finding: Finding
    why: str = ""
    here: Spread | None = None
    there: Spread | None = None
    pairs: int = 0


@dataclass(frozen=True)
class Verdict:
    """Verdict on all runs of a strategy (are there traces of unlearned tasks?), and the outcomes of its tests."""

    kind: Kind
    claim: str
    outcomes: Sequence[Outcome]
    rests_on: Sequence[str] = ()
    """Parts of the user's code that must carry nothing between tasks, if the claim is ``conditional``."""
    notes: str = ""
    """Notes on the runs: requests not obeyed, records missing, or runs that stopped early."""

    def __str__(self) -> str:
        return f"{WORDS[self.kind]}{', proved' * self._is_proved}"

    @property
    def _is_proved(self) -> bool:
        return self.kind == "exact" and self.claim == PROVED

    @property
    def why(self) -> str:
        """Return a short reason for the verdict as text, with notes on the runs."""
        return "; ".join(words for words in (self._reason, self.notes) if words)

    @property
    def _reason(self) -> str:
        if self.kind == "nothing":
            return ""
        if self.kind in ("exact", "conditional"):
            tested = any(outcome.pairs for outcome in self.outcomes)
            more = f" and {len(self.rests_on) - 3} more" if len(self.rests_on) > 3 else ""
            rests = f", if these are stateless: {', '.join(self.rests_on[:3])}{more}," if self.rests_on else ""
            how = "a retrained model has the same bits," if self._is_proved else f"by construction{rests or ','}"
            return f"{how} and {'no test contradicts it' if tested else 'not tested'}"
        found = [outcome for outcome in self.outcomes if outcome.finding == self.kind]
        deciding = listed([outcome.test.check for outcome in found])
        if self.kind == "clear":
            return f"{deciding} agree"
        if self.kind == "likely":
            deciding = f"{deciding}: {'; '.join(outcome.why for outcome in found)}"
        against = "" if self.claim == "approximate" else "against its claim to be exact, "
        return f"{against if self.claim else ''}by {deciding}"


def verdict_of(runs: Sequence[Run]) -> Verdict:
    """Return the verdict (are there traces of unlearned tasks?) on a strategy's runs, one per seed, at their end.

    ``exact`` needs the claim of all records and no contradicting test. Any difference from the retrained model, even
    within the tolerance, contradicts it, because equal bits give equal metrics. One test with a trace decides for
    ``trace``, else one with a likely trace for ``likely``; one possible trace leaves the verdict undecided. ``clear``
    needs every test to be able to find a trace.
    """
    claim, notes = claim_of(runs), "; ".join(_notes(runs))
    if not any(run.last.unlearned or run.last.parts for run in runs):  # no request, or learned again
        return Verdict("nothing", claim, (), notes=notes)
    by_construction: dict[str, Kind] = {"exact": "exact", PROVED: "exact", "conditional": "conditional"}
    outcomes = list(_outcomes(runs, exact=claim in by_construction))
    kind: Kind = _worst(outcomes).finding
    kind = by_construction.get(claim, kind) if kind in ("weak", "clear") else kind
    return Verdict(kind, claim, outcomes, plan_values(runs, "rests_on"), notes)


def claim_of(runs: Sequence[Run]) -> str:
    """Return the weakest claim of all unlearnings (approximate, conditional, exact); empty if nothing was unlearned.

    ``exact, proved`` if every claim is ``exact``, and the last one of each run was proved.
    """
    last = {run.records[-1]["claim"] if run.records and not run.unrecorded else "" for run in runs}
    claims = {record["claim"] for run in runs for record in run.records}
    claims |= {moment.claim for run in runs for moment in run.moments if moment.claim}
    if not claims or not any(run.unlearns for run in runs):
        return ""
    if claims - {"exact", PROVED, "conditional"}:
        return "approximate"
    if "conditional" in claims:
        return "conditional"
    return PROVED if last == {PROVED} else "exact"


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    if not any(run.unlearns for run in runs):
        yield "obeys no request"
    longest = max(len(run.moments) for run in runs)
    end = next(run.last.task for run in runs if len(run.moments) == longest)
    if missing := sum(run.unrecorded for run in runs):
        yield f"{missing} {'record is' if missing == 1 else 'records are'} missing"
    for run in runs:
        if not run.ended or (len(run.moments) < longest and run.last.task != end):
            yield f"{run.seed_text} stopped after task {run.last.task}"


def _outcomes(runs: Sequence[Run], exact: bool) -> Iterator[Outcome]:
    """Yield each trace test's outcome, and one for all JSDs to retrained models; ``exact``: any difference counts."""
    whole, parts = any(run.last.unlearned for run in runs), any(run.last.parts for run in runs)
    tests = [test for test in TRACE_TESTS if (parts if test.of_samples else whole)]
    yield from (_outcome(test, runs, exact) for test in tests)
    if whole:
        shown, *others = dict.fromkeys(name for run in runs for name in jsd_names(run.last)) or [JSD.metric]
        through = [_outcome(replace(JSD, metric=name), runs, exact) for name in others]
        yield _worst(
            [
                _outcome(replace(JSD, metric=shown), runs, exact),
                *(replace(each, why=f"{each.test.metric}: {each.why or 'beyond both floors'}") for each in through),
            ]
        )
    if exact and _differs(KEPT, runs):
        yield _outcome(KEPT, runs, exact)


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    return min(outcomes, key=lambda outcome: list(FINDINGS).index(outcome.finding))


def _outcome(test: TraceTest, runs: Sequence[Run], exact: bool) -> Outcome:
    found = _compare(test, runs)
    if exact and found.finding in ("clear", "weak") and _differs(test, runs):
        return replace(found, finding="possible", why="not equal to the retrained model")
    return found


def _differs(test: TraceTest, runs: Sequence[Run]) -> bool:
    """Return True if, in at least one run, the metric differs between the tested and the retrained model."""
    if test.in_floors:  # the JSD of equal models is 0
        return any(value >= RESOLUTION for run in runs for value in run.last.numbers.get(test.metric, {}).values())
    return any(abs(pair.here - pair.there) >= RESOLUTION for run in runs for pair in _pairs(test, run))


def _compare(test: TraceTest, runs: Sequence[Run]) -> Outcome:
    """Return the outcome of a test that compares a metric with its value on the retrained model, by task and seed."""
    here, there = (spread(run.last.number(name) for run in runs) for name in (test.metric, test.compared_metric))
    pairs = [pair for run in runs for pair in _pairs(test, run)]
    ours, theirs = [pair.here for pair in pairs], [pair.there for pair in pairs]
    low, high = _difference_bounds(ours, theirs)

    def outcome(finding: Finding, why: str = "") -> Outcome:
        return Outcome(test, finding, why, here, there, len(pairs))

    if here is None:
        return outcome("weak", "not measured")
    if there is None or not pairs:
        return outcome("weak", "no data-order floor" if test.in_floors else "not measured on the retrained model")
    unread = sorted({task for run in runs for task in _unmeasured(test, run)})
    if test.in_floors and max(ours) < RESOLUTION and not unread:
        return outcome("clear")
    mean, tolerance = fmean(ours) - fmean(theirs), _tolerance(test, fmean(theirs))
    if mean > tolerance:
        if mean <= FAR * tolerance and low <= 0:
            if by_samples := _likely_trace(test, runs):
                return outcome("likely", by_samples)
            return outcome("possible", f"{len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} can't rule out chance")
        wider_floor = spread(run.last.number(f"{test.metric}{test.wider_floor}") for run in runs)
        if test.wider_floor and (wider_floor is None or here.mean <= wider_floor.mean):
            return outcome("possible", "within another seed's floor" if wider_floor else "no seed floor was measured")
        return outcome("trace")
    # Allow twice the tolerance for one task or one seed, because these vary more than the mean of all.
    by_task = group_by(pairs, lambda pair: pair.task)
    if far := [task for task, of in by_task.items() if task is not None and _exceeds(test, of)]:
        return outcome("possible", f"on {tasks(far)}")
    if alone := [run.seed_text for run in runs if _exceeds(test, _pairs(test, run))]:
        return outcome("possible", f"in {listed(alone)}")
    if unread:
        return outcome("weak", f"not measured on {tasks(unread)}")
    if test.axis.ends is not None and fmean(theirs) + tolerance > test.axis.ends[1]:
        return outcome("weak", "the retrained model leaves no room above it")
    if len(pairs) < FEWEST or high > tolerance:
        return outcome("weak", "too few tasks and seeds")
    return outcome("clear")


def _likely_trace(test: TraceTest, runs: Sequence[Run]) -> str:
    """Pool the test samples of all runs; if a trace of unlearned tasks is likely, return the numbers, else empty text.

    A one-sided test of two proportions of all test samples, of the model and of the higher one of two retrained models.
    The difference of these, which have other data orders, is added to the noise, because orders move whole tasks.
    """
    names = (test.metric, test.compared_metric, f"{test.metric}_floor_order", f"{test.metric}_samples")
    found = [[run.last.number(name, pair.task) for name in names] for run in runs for pair in _pairs(test, run)]
    read = np.array(found, dtype=float)
    if len(read) < FEWEST or np.isnan(read).any():
        return ""
    weights = read[:, 3] / read[:, 3].sum()
    here, there, order = weights @ read[:, :3]
    sum_of_two, n = here + max(there, order), read[:, 3].sum()
    noise = math.sqrt(sum_of_two * (1 - sum_of_two / 2) / n + np.square(weights * (read[:, 2] - read[:, 1])).sum())
    p = NormalDist().cdf((max(there, order) - here) / noise)
    retrained = f"{percent(there)} in the retrained model and {percent(order)} in one of another order"
    return f"{percent(here)} of {n:.0f} samples against {retrained} (p = {p:.1g})" if p < LIKELY else ""


def _pairs(test: TraceTest, run: Run) -> list[Pair]:
    """Return the metric on the tested and the retrained model, paired by task; if there are only means, their pair."""
    here, there = (run.last.numbers.get(name, {}) for name in (test.metric, test.compared_metric))
    shared = [task for task in here if task in there]
    return [Pair(task, here[task], there[task]) for task in shared if task is not None or shared == [None]]


def _unmeasured(test: TraceTest, run: Run) -> set[int]:
    """Return unlearned tasks without the metric on the tested or retrained model; none if only means were logged."""
    read = {pair.task for pair in _pairs(test, run)}
    return set() if test.of_samples or None in read else set(run.last.unlearned) - read


def _exceeds(test: TraceTest, pairs: Sequence[Pair]) -> bool:
    """Return True if the tested model's mean metric is above the retrained model's by over twice the tolerance."""
    if not pairs:
        return False
    ours, theirs = fmean(pair.here for pair in pairs), fmean(pair.there for pair in pairs)
    return ours - theirs > 2 * _tolerance(test, theirs)


def _tolerance(test: TraceTest, there: float) -> float:
    return test.tolerance * (there if test.in_floors else 1.0)


def _difference_bounds(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return (lower, upper): one-sided 95 % bounds of the mean of ``ours - theirs``, by Student's t over the pairs."""
    if len(ours) < 2:
        return -math.inf, math.inf
    test = paired_test(ours, theirs, confidence=0.9)
    return test.interval or (test.mean_difference, test.mean_difference)


def verdicts_as_text(entries: Sequence[Entry]) -> str:
    """Return one line of text per strategy with its name and verdict, for the terminal."""
    width = max(len(entry.name) for entry in entries)
    found = [(entry.name, verdict_of(entry.runs)) for entry in entries]
    return "\n".join(f"{name:{width}}  {one}{f' ({one.notes})' * bool(one.notes)}" for name, one in found)
