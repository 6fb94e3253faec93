"""Verdicts: from all tests together, with the power that tasks and seeds give, and in the same words everywhere."""

from pathlib import Path

import pytest

from avalanche_amnesia.lab.report.measures import JSD, READINGS
from avalanche_amnesia.lab.report.reading import Moment, Run
from avalanche_amnesia.lab.report.verdicts import verdict_of, verdicts_as_text

TESTS = {reading.check: reading for reading in (*READINGS, JSD)}
BESIDE = {"old head": 0.5, "relapse": 0.8, "few-shot relearning": 0.7, "membership inference": 0.5, "JSD": 0.02}
"""Test → what the retrained model reads; of the JSD its order floor."""
CLOSE = (0.01, -0.01, 0.0, 0.02, -0.02, 0.01)
"""Differences of six tasks that no tolerance is exceeded by."""


def run_of(seed=1, claim="approximate", beside=BESIDE, seed_floor=0.1, parts=(), **more):
    """A run whose tasks read by so much more than on the retrained model, of each test; ``None``: not measured."""
    differences = {check: [0.1 * d if check == "JSD" else d for d in CLOSE] for check in beside} | more
    n_tasks = max((len(of) for of in differences.values() if of), default=0)
    numbers = {}
    for check, of in differences.items():
        if of is not None:
            reading = TESTS[check]
            here = {task: beside[check] + difference for task, difference in enumerate(of)}
            numbers[reading.metric] = {None: sum(here.values()) / len(here), **here}
            there = dict.fromkeys([None, *here], beside[check])
            numbers[f"{reading.metric}{reading.beside}"] = there
    if "JSD_own" in numbers:
        numbers |= {"JSD_own_tasks": {None: n_tasks}}
        numbers |= {} if seed_floor is None else {"JSD_own_floor_seed": {None: seed_floor}}
    gone = () if parts else tuple(range(n_tasks))
    moment = Moment(9, (9,), gone, gone, claim, numbers, parts=parts, parts_now=parts)
    return Run(Path("x"), "x", {}, seed, {}, [moment])


@pytest.mark.parametrize(
    ("changed", "verdict", "why"),
    [
        ({}, "no trace found", "all five"),
        ({"claim": "exact"}, "exact", "by construction"),
        # 68 % where the retrained model reads 50 %: with one task nobody can tell, with six that agree all can
        ({"old head": [0.18]}, "undecided: a possible trace", "by old head"),
        ({"old head": [0.18, 0.02, -0.05]}, "undecided: a possible trace", "by old head"),
        ({"old head": [0.18, 0.17, 0.19]}, "trace found", "by old head"),
        ({"old head": [0.45]}, "trace found", "by old head"),  # too far for any chance
        ({"few-shot relearning": [0.06, 0.07, 0.06]}, "trace found", "by few-shot relearning"),
        ({"few-shot relearning": [0.05, 0.0, 0.05]}, "undecided: tests too weak", "by few-shot relearning"),
        ({"few-shot relearning": [0.0, 0.0]}, "undecided: tests too weak", "by few-shot relearning"),  # two are too few
        ({"few-shot relearning": [-0.2, 0.2, 0.0]}, "undecided: a possible trace", "by few-shot relearning"),
        ({"few-shot relearning": [-0.2, 0.1, 0.0]}, "undecided: tests too weak", "by few-shot relearning"),
        ({"relapse": None}, "undecided: tests too weak", "by relapse"),  # what was not measured says nothing
        ({"relapse": [0.06, 0.06, 0.06], "old head": [0.45]}, "trace found", "by old head and relapse"),
        ({"JSD": [0.03, 0.04, 0.03]}, "undecided: a possible trace", "by JSD"),  # within another seed's floor
        ({"JSD": [0.2, 0.3, 0.2]}, "trace found", "by JSD"),
        ({"JSD": [0.2, 0.3, 0.2], "seed_floor": None}, "undecided: a possible trace", "by JSD"),
        ({"claim": "exact", "old head": [0.45]}, "trace found", "against its claim to be exact, by old head"),
        ({"claim": "exact", "relapse": None}, "exact", "by construction"),  # it rests on no test
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
    one = outcome_of("old head", run_of(**{"old head": wide}))
    assert (one.finding, one.why, one.pairs) == ("weak", "too few tasks and seeds", 3)
    many = outcome_of("old head", *(run_of(seed, **{"old head": wide}) for seed in range(5)))
    assert (many.finding, many.pairs) == ("clear", 15)
    assert many.at_most < 0.05 < one.at_most


def test_a_test_without_room_above_the_retrained_model_finds_nothing():
    full = outcome_of("relapse", run_of(beside=BESIDE | {"relapse": 0.96}))
    assert (full.finding, full.why) == ("weak", "the retrained model leaves no room above it")


@pytest.mark.parametrize(
    ("floor", "distance", "finding"),
    [(1e-17, 1e-17, "clear"), (0.02, 1e-12, "clear"), (1e-17, 0.01, "possible"), (1e-17, 0.2, "trace")],
)
def test_a_distance_below_detection_is_none(floor, distance, finding):
    run = run_of(beside=BESIDE | {"JSD": floor}, JSD=[distance - floor] * 3)
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
    told = verdicts_as_text({"A": [run_of()], "Long name": [run_of(**{"old head": [0.45]})]})
    assert told == "A          no trace found\nLong name  trace found"
