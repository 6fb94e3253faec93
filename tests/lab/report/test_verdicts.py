"""Verdicts follow from all tests together and from the number of tasks and seeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from avalanche_amnesia.audit.record import NOT_OBEYED
from avalanche_amnesia.lab.report.measures import JSD, TRACE_TESTS
from avalanche_amnesia.lab.report.reading import Entry, Evaluation, Run
from avalanche_amnesia.lab.report.verdicts import verdict_of, verdicts_as_text

REMAINING = "JSD through the masks of remaining tasks"
TESTS = {reading.check: reading for reading in (*TRACE_TESTS, JSD)} | {REMAINING: replace(JSD, metric="JSD_remaining")}
BESIDE = {"old head": 0.5, "relapse": 0.8, "few-shot relearning": 0.7, "membership inference": 0.5, "JSD": 0.02}
"""Test → value of the retrained model; for the JSD, the data-order floor."""
CLOSE = (0.01, -0.01, 0.0, 0.02, -0.02, 0.01)
"""Differences of six tasks within every tolerance."""
EQUAL = {check: [-0.02 if check == "JSD" else 0.0] * 6 for check in BESIDE}
"""Differences of a model with the bits of the retrained model."""


def run_of(seed=1, claim="approximate", beside=BESIDE, seed_floor=0.1, parts=(), n_tasks=6, **more):
    """Return a run with these differences from the retrained model by test; ``None``: not measured."""
    differences = {check: [0.1 * d if check == "JSD" else d for d in CLOSE[:n_tasks]] for check in beside} | more
    numbers = {}
    for check, of in differences.items():
        if of is not None:
            reading = TESTS[check]
            floor = beside["JSD"] if check == REMAINING else beside[check]
            here = {task: floor + difference for task, difference in enumerate(of) if difference is not None}
            numbers[reading.metric] = {None: sum(here.values()) / len(here), **here}
            there = dict.fromkeys([None, *here], floor)
            numbers[f"{reading.metric}{reading.compare_to}"] = there
    for name in [name for name in numbers if name in ("JSD_own", "JSD_remaining")]:
        numbers |= {f"{name}_tasks": {None: n_tasks}}
        numbers |= {} if seed_floor is None else {f"{name}_floor_seed": {None: seed_floor}}
    gone = () if parts else tuple(range(n_tasks))
    moment = Evaluation(9, (9,), gone, gone, claim, numbers, parts=parts, parts_now=parts)
    return Run(Path("x"), "x", {}, seed, {}, [moment])


WEAK, POSSIBLE = "undecided: tests too weak", "undecided: a possible trace"
TRACE, NONE = "trace found", "no trace found"
EXACT = {"claim": "exact", **EQUAL}
VERDICTS = [
    ({}, NONE, "all five"),
    (EXACT, "exact", "by construction, and no test contradicts it"),
    ({"claim": "exact", "beside": {}, "old head": None}, "exact", "by construction, and not tested"),
    # an exact claim allows no difference: tolerances do not apply
    (EXACT | {"old head": [0.0, 0.0, 0.01]}, POSSIBLE, "against its claim"),
    (EXACT | {"JSD": [-0.015] * 6}, POSSIBLE, "against its claim to be exact, by JSD"),
    ({"claim": "exact", "old head": [0.45]}, TRACE, "against its claim to be exact, by old head"),
    (EXACT | {"claim": "conditional"}, "exact if stateless", "by construction, and no test"),
    (EXACT | {"claim": "conditional", "old head": [0.0, 0.0, 0.01]}, POSSIBLE, "against its claim to be exact"),
    (EXACT | {"relapse": None}, "exact", "by construction"),  # the claim depends on no test
    # a task without a value, and a JSD through other masks
    ({"old head": [0.0, 0.01, None, -0.01, 0.0, 0.01]}, WEAK, "by old head"),
    ({"JSD": None}, WEAK, "by JSD"),
    ({REMAINING: [0.2, 0.3, 0.2, 0.2, 0.2, 0.2]}, TRACE, "by JSD"),
    ({REMAINING: [0.0] * 6}, NONE, "all five"),
    # 68 % where the retrained model reads 50 %: one task is too few, three that agree are enough
    ({"old head": [0.18]}, POSSIBLE, "by old head"),
    ({"old head": [0.18, 0.02, -0.05]}, POSSIBLE, "by old head"),
    ({"old head": [0.18, 0.17, 0.19]}, TRACE, "by old head"),
    ({"old head": [0.45]}, TRACE, "by old head"),  # too large for chance
    ({"few-shot relearning": [0.06, 0.07, 0.06]}, TRACE, "by few-shot relearning"),
    ({"few-shot relearning": [0.05, 0.0, 0.05]}, WEAK, "by few-shot relearning"),
    ({"n_tasks": 2}, WEAK, "by old head"),
    ({"few-shot relearning": [-0.2, 0.2, 0.0]}, POSSIBLE, "by few-shot relearning"),
    ({"few-shot relearning": [-0.2, 0.1, 0.0]}, WEAK, "by few-shot relearning"),
    ({"relapse": None}, WEAK, "by relapse"),
    ({"relapse": [0.06, 0.06, 0.06], "old head": [0.45]}, TRACE, "by old head and relapse"),
    ({"JSD": [0.03, 0.04, 0.03]}, POSSIBLE, "by JSD"),  # within the floor of another seed
    ({"JSD": [0.2, 0.3, 0.2]}, TRACE, "by JSD"),
    ({"JSD": [0.2, 0.3, 0.2], "seed_floor": None}, POSSIBLE, "by JSD"),
]


def test_a_verdict_follows_from_all_tests_together():
    for changed, verdict, why in VERDICTS:
        found = verdict_of([run_of(**changed)])
        assert str(found) == verdict, changed
        if why == "all five":
            why = "old head, relapse, few-shot relearning, membership inference and JSD agree"
        assert found.why.startswith(why), changed


def outcome_of(check, *runs):
    return next(outcome for outcome in verdict_of(runs).outcomes if outcome.test.check == check)


def test_more_seeds_make_a_test_stronger():
    wide = [0.08, -0.04, 0.03]
    one = outcome_of("old head", run_of(n_tasks=3, **{"old head": wide}))
    assert (one.finding, one.why, one.pairs) == ("weak", "too few tasks and seeds", 3)
    many = outcome_of("old head", *(run_of(seed, n_tasks=3, **{"old head": wide}) for seed in range(5)))
    assert (many.finding, many.pairs) == ("clear", 15)


def test_a_trace_in_one_seed_is_not_averaged_away():
    tests = dict.fromkeys(["old head", "few-shot relearning"], [0.25] * 6)
    runs = [run_of(seed, **(tests if seed == 5 else {})) for seed in range(10)]
    found = verdict_of(runs)
    assert (str(found), outcome_of("old head", *runs).why) == ("undecided: a possible trace", "in seed 5")
    assert str(verdict_of(runs[5:6])) == "trace found"
    assert outcome_of("old head", *(replace(run, seed=None) for run in runs)).why == "in the run"


def read_by_old_heads(here, there, order, samples=72, claim="approximate"):
    """Return a run with these accuracies of old heads by task, and nothing else."""
    run = run_of(claim=claim, beside={}, n_tasks=len(here))
    read = {"": here, "_reference": there, "_floor_order": order, "_samples": [samples] * len(here)}
    for suffix, values in read.items():
        there = {task: value for task, value in enumerate(values) if value is not None}
        run.last.numbers[f"UnlearnedAccuracy{suffix}"] = {None: sum(there.values()), **there}
    return run


def test_a_trace_is_likely_if_samples_rule_out_chance():
    there, order = (0.507, 0.556, 0.437), (0.507, 0.514, 0.493)
    found = verdict_of([read_by_old_heads((0.753, 0.806, 0.493), there, order)])
    assert str(found) == "trace likely"
    words = (
        "68.4 % of 216 samples against 50.0 % in the retrained model and 50.5 % in one of another order (p = 0.0003)"
    )
    assert found.why.replace("\u00a0", " ") == f"by old head: {words}"
    for more in ({"samples": 20}, {"order": (0.8, 0.3, 0.5)}, {"order": (0.5, None, 0.5)}, {"samples": None}):
        found = verdict_of(
            [read_by_old_heads(**{"here": (0.753, 0.806, 0.493), "there": there, "order": order} | more)]
        )
        assert str(found) == POSSIBLE, more


def test_a_trace_is_not_likely_by_chance():
    draw = np.random.default_rng(0)
    for noise in (0.0, 0.06):  # of the models
        read = draw.binomial(72, 0.5 + noise * draw.standard_normal((1000, 3, 3))) / 72
        assert [str(verdict_of([read_by_old_heads(*each)])) for each in read.tolist()].count("trace likely") <= 1
    exact = [verdict_of([read_by_old_heads(one, one, other, claim="exact")]) for one, other, _ in read.tolist()]
    assert {str(verdict) for verdict in exact} == {"exact"}


def test_an_exact_claim_includes_the_accuracy_on_remaining_tasks():
    run = run_of(claim="exact", **EQUAL)
    run.last.numbers["Top1_Acc_Exp"], run.last.numbers["Accuracy_reference"] = {9: 0.6}, {9: 0.9}
    assert verdict_of([run]).why == "against its claim to be exact, by accuracy on remaining tasks"
    run.last.numbers["Accuracy_reference"][9] = 0.6
    assert str(verdict_of([run])) == "exact"


def test_a_conditional_verdict_names_the_parts_of_all_records():
    plan = {"claim": "conditional", "rests_on": ["mine.Data"]}
    run = replace(
        run_of(claim="conditional", **EQUAL), records=({"plan": plan | {"reasons": []}, "claim": "conditional"},)
    )
    assert "if these are stateless: mine.Data, and no test contradicts it" in verdict_of([run]).why


def test_controls_and_stopped_runs_are_named():
    ignored = {"plan": {"reasons": [NOT_OBEYED]}, "claim": "approximate"}
    control = verdict_of([replace(run_of(), records=[ignored])])
    assert (control.claim, control.why.split("; ")[1]) == ("", "obeys no request")
    stopped = [run_of(1), replace(run_of(2), ended=False)]
    assert verdict_of(stopped).why.endswith("; seed 2 stopped after task 9")
    early = replace(run_of(1).last, task=4)
    shorter = [replace(run_of(1), moments=[early]), replace(run_of(2), moments=[early, run_of().last])]
    assert verdicts_as_text([Entry("A", shorter)]) == "A  no trace found (seed 1 stopped after task 4)"


def test_a_test_is_weak_if_the_retrained_model_is_near_the_maximum():
    full = outcome_of("relapse", run_of(beside=BESIDE | {"relapse": 0.96}))
    assert (full.finding, full.why) == ("weak", "the retrained model leaves no room above it")


def test_a_distance_below_detection_counts_as_0():
    for floor, distance, finding in (
        *((1e-17, 1e-17, "clear"), (0.02, 1e-12, "clear")),
        *((1e-17, 0.01, "possible"), (1e-17, 0.2, "trace")),
    ):
        run = run_of(beside=BESIDE | {"JSD": floor}, JSD=[distance - floor] * 6)
        assert outcome_of("JSD", run).finding == finding


def test_unlearned_samples_have_their_own_tests():
    beside = {"forgotten samples": 0.9, "membership of forgotten samples": 0.5}
    found = verdict_of([run_of(beside=beside, parts=("3 samples of task 1",))])
    assert [outcome.test.check for outcome in found.outcomes] == list(beside)
    assert str(found) == "no trace found"


def test_without_a_request_nothing_is_unlearned():
    run = run_of()
    moment = Evaluation(0, (0,), (), (), None, {})
    again = [*run.moments, Evaluation(0, tuple(range(10)), (), (), "approximate", {})]
    for moments in ([moment], again):
        assert verdict_of([Run(run.folder, "x", {}, 1, {}, moments)]).why == ""
        assert str(verdict_of([Run(run.folder, "x", {}, 1, {}, moments)])) == "nothing is unlearned"


def test_verdicts_as_text_have_a_line_for_each_strategy():
    told = verdicts_as_text([Entry("A", [run_of()]), Entry("Long name", [run_of(**{"old head": [0.45]})])])
    assert told == "A          no trace found\nLong name  trace found"
