"""Verdicts: from all tests together, with the power that tasks and seeds give, and in the same words everywhere."""

from dataclasses import replace
from pathlib import Path

import pytest

from avalanche_amnesia.audit.record import NOT_OBEYED
from avalanche_amnesia.lab.report.measures import JSD, READINGS
from avalanche_amnesia.lab.report.reading import Entry, Moment, Run
from avalanche_amnesia.lab.report.verdicts import verdict_of, verdicts_as_text

REMAINING = "JSD through the masks of remaining tasks"
TESTS = {reading.check: reading for reading in (*READINGS, JSD)} | {REMAINING: replace(JSD, metric="JSD_remaining")}
BESIDE = {"old head": 0.5, "relapse": 0.8, "few-shot relearning": 0.7, "membership inference": 0.5, "JSD": 0.02}
"""Test → what the retrained model reads; of the JSD its order floor."""
CLOSE = (0.01, -0.01, 0.0, 0.02, -0.02, 0.01)
"""Differences of six tasks that no tolerance is exceeded by."""


EQUAL = {check: [-0.02 if check == "JSD" else 0.0] * 6 for check in BESIDE}
"""No test differs from the retrained model, as under equal bits."""


def run_of(seed=1, claim="approximate", beside=BESIDE, seed_floor=0.1, parts=(), n_tasks=6, **more):
    """A run whose tasks read by so much more than on the retrained model, of each test; ``None``: not measured."""
    differences = {check: [0.1 * d if check == "JSD" else d for d in CLOSE[:n_tasks]] for check in beside} | more
    numbers = {}
    for check, of in differences.items():
        if of is not None:
            reading = TESTS[check]
            floor = beside["JSD"] if check == REMAINING else beside[check]
            here = {task: floor + difference for task, difference in enumerate(of) if difference is not None}
            numbers[reading.metric] = {None: sum(here.values()) / len(here), **here}
            there = dict.fromkeys([None, *here], floor)
            numbers[f"{reading.metric}{reading.beside}"] = there
    for name in [name for name in numbers if name in ("JSD_own", "JSD_remaining")]:
        numbers |= {f"{name}_tasks": {None: n_tasks}}
        numbers |= {} if seed_floor is None else {f"{name}_floor_seed": {None: seed_floor}}
    gone = () if parts else tuple(range(n_tasks))
    moment = Moment(9, (9,), gone, gone, claim, numbers, parts=parts, parts_now=parts)
    return Run(Path("x"), "x", {}, seed, {}, [moment])


@pytest.mark.parametrize(
    ("changed", "verdict", "why"),
    [
        ({}, "no trace found", "all five"),
        ({"claim": "exact", **EQUAL}, "exact", "by construction, and no test contradicts it"),
        ({"claim": "exact", "beside": {}, "old head": None}, "exact", "by construction, and not tested"),
        # equal bits read the same: nothing is within a tolerance
        ({"claim": "exact", **EQUAL, "old head": [0.0, 0.0, 0.01]}, "undecided: a possible trace", "against its claim"),
        (
            {"claim": "exact", **EQUAL, "JSD": [-0.015] * 6},
            "undecided: a possible trace",
            "against its claim to be exact, by JSD",
        ),
        # a task without a reading, and a JSD through other masks
        ({"old head": [0.0, 0.01, None, -0.01, 0.0, 0.01]}, "undecided: tests too weak", "by old head"),
        ({"JSD": None}, "undecided: tests too weak", "by JSD"),
        ({REMAINING: [0.2, 0.3, 0.2, 0.2, 0.2, 0.2]}, "trace found", "by JSD"),
        ({REMAINING: [0.0] * 6}, "no trace found", "all five"),
        # 68 % where the retrained model reads 50 %: with one task nobody can tell, with six that agree all can
        ({"old head": [0.18]}, "undecided: a possible trace", "by old head"),
        ({"old head": [0.18, 0.02, -0.05]}, "undecided: a possible trace", "by old head"),
        ({"old head": [0.18, 0.17, 0.19]}, "trace found", "by old head"),
        ({"old head": [0.45]}, "trace found", "by old head"),  # too far for any chance
        ({"few-shot relearning": [0.06, 0.07, 0.06]}, "trace found", "by few-shot relearning"),
        ({"few-shot relearning": [0.05, 0.0, 0.05]}, "undecided: tests too weak", "by few-shot relearning"),
        ({"n_tasks": 2}, "undecided: tests too weak", "by old head"),  # two are too few
        ({"few-shot relearning": [-0.2, 0.2, 0.0]}, "undecided: a possible trace", "by few-shot relearning"),
        ({"few-shot relearning": [-0.2, 0.1, 0.0]}, "undecided: tests too weak", "by few-shot relearning"),
        ({"relapse": None}, "undecided: tests too weak", "by relapse"),  # what was not measured says nothing
        ({"relapse": [0.06, 0.06, 0.06], "old head": [0.45]}, "trace found", "by old head and relapse"),
        ({"JSD": [0.03, 0.04, 0.03]}, "undecided: a possible trace", "by JSD"),  # within another seed's floor
        ({"JSD": [0.2, 0.3, 0.2]}, "trace found", "by JSD"),
        ({"JSD": [0.2, 0.3, 0.2], "seed_floor": None}, "undecided: a possible trace", "by JSD"),
        ({"claim": "exact", "old head": [0.45]}, "trace found", "against its claim to be exact, by old head"),
        ({"claim": "exact", **EQUAL, "relapse": None}, "exact", "by construction"),  # it rests on no test
    ],
)
def test_a_verdict_comes_of_all_tests_together(changed, verdict, why):
    found = verdict_of([run_of(**changed)])
    assert str(found) == verdict
    if why == "all five":
        assert found.why == "old head, relapse, few-shot relearning, membership inference and JSD agree"
    else:
        assert found.why.startswith(why)


def outcome_of(check, *runs):
    return next(outcome for outcome in verdict_of(runs).outcomes if outcome.reading.check == check)


def test_seeds_give_the_power_that_tasks_do_not():
    wide = [0.08, -0.04, 0.03]
    one = outcome_of("old head", run_of(n_tasks=3, **{"old head": wide}))
    assert (one.finding, one.why, one.pairs) == ("weak", "too few tasks and seeds", 3)
    many = outcome_of("old head", *(run_of(seed, n_tasks=3, **{"old head": wide}) for seed in range(5)))
    assert (many.finding, many.pairs) == ("clear", 15)
    assert many.at_most < 0.05 < one.at_most


def test_one_seed_is_not_averaged_away():
    tests = dict.fromkeys(["old head", "few-shot relearning"], [0.25] * 6)
    runs = [run_of(seed, **(tests if seed == 5 else {})) for seed in range(10)]
    found = verdict_of(runs)
    assert (str(found), outcome_of("old head", *runs).why) == ("undecided: a possible trace", "in seed 5")
    assert str(verdict_of(runs[5:6])) == "trace found"
    assert outcome_of("old head", *(replace(run, seed=None) for run in runs)).why == "in the run"


def test_what_is_exact_keeps_the_remaining_accuracy_too():
    run = run_of(claim="exact", **EQUAL)
    run.last.numbers["Top1_Acc_Exp"], run.last.numbers["Accuracy_reference"] = {9: 0.6}, {9: 0.9}
    assert verdict_of([run]).why == "against its claim to be exact, by accuracy on remaining tasks"
    run.last.numbers["Accuracy_reference"][9] = 0.6
    assert str(verdict_of([run])) == "exact"


def test_a_control_and_a_stopped_run_are_called_so():
    ignored = {"plan": {"claim": "approximate", "reasons": [NOT_OBEYED]}}
    control = verdict_of([replace(run_of(), records=[ignored])])
    assert (control.claim, control.why.split("; ")[1]) == ("", "obeys no request")
    stopped = [run_of(1), replace(run_of(2), ended=False)]
    assert verdict_of(stopped).why.endswith("; seed 2 stopped after task 9")
    early = replace(run_of(1).last, task=4)
    shorter = [replace(run_of(1), moments=[early]), replace(run_of(2), moments=[early, run_of().last])]
    assert verdicts_as_text([Entry("A", shorter)]) == "A  no trace found (seed 1 stopped after task 4)"


def test_a_test_without_room_above_the_retrained_model_finds_nothing():
    full = outcome_of("relapse", run_of(beside=BESIDE | {"relapse": 0.96}))
    assert (full.finding, full.why) == ("weak", "the retrained model leaves no room above it")


@pytest.mark.parametrize(
    ("floor", "distance", "finding"),
    [(1e-17, 1e-17, "clear"), (0.02, 1e-12, "clear"), (1e-17, 0.01, "possible"), (1e-17, 0.2, "trace")],
)
def test_a_distance_below_detection_is_none(floor, distance, finding):
    run = run_of(beside=BESIDE | {"JSD": floor}, JSD=[distance - floor] * 6)
    assert outcome_of("JSD", run).finding == finding


def test_forgotten_samples_have_tests_of_their_own():
    beside = {"forgotten samples": 0.9, "membership of forgotten samples": 0.5}
    found = verdict_of([run_of(beside=beside, parts=("3 samples of task 1",))])
    assert [outcome.reading.check for outcome in found.outcomes] == list(beside)
    assert str(found) == "no trace found"


def test_without_a_request_there_is_nothing_to_judge():
    run = run_of()
    moment = Moment(0, (0,), (), (), None, {})
    again = [*run.moments, Moment(0, tuple(range(10)), (), (), "approximate", {})]
    for moments in ([moment], again):
        assert verdict_of([Run(run.folder, "x", {}, 1, {}, moments)]).why == ""
        assert str(verdict_of([Run(run.folder, "x", {}, 1, {}, moments)])) == "nothing is unlearned"


def test_verdicts_of_all_strategies_stand_below_each_other():
    told = verdicts_as_text([Entry("A", [run_of()]), Entry("Long name", [run_of(**{"old head": [0.45]})])])
    assert told == "A          no trace found\nLong name  trace found"
