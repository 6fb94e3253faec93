"""Request scenarios: streams accept every schedule, and a task always remains."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.strategies import DIGITS, brief, learn

from avalanche_amnesia import References, RequestError, UnlearningRequest
from avalanche_amnesia.benchmarks.requests import tasks_after_each, without_requests
from avalanche_amnesia.contrib.streams import scenarios
from avalanche_amnesia.contrib.streams.scenarios import Scenario
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.runs import measure_run
from avalanche_amnesia.lab.study.settings import SCENARIOS
from avalanche_amnesia.training.host.lookup import unlearning_of


def remaining_after(scenario, n_tasks):
    return [remaining for _, remaining in tasks_after_each(scenario.on(tiny.blank(n_tasks)).train_stream)]


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 20))
def test_every_scenario_is_accepted_and_always_leaves_a_task(n_tasks):
    for name, make in ((name, getattr(scenarios, name)) for name in SCENARIOS):
        scenario = make(n_tasks)
        assert all(remaining_after(scenario, n_tasks)), name
        assert bool(scenario.requested) == (name not in ("none", "listed"))
        carried = [r for e in scenario.on(tiny.blank(n_tasks)).train_stream for r in e.requests]
        assert {task for request in carried for task in request.tasks} == scenario.requested


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(2, 5), st.integers(1, 4), st.integers(0, 99))
def test_scenarios_with_other_options_always_leave_a_task(n_tasks, every, size, seed):
    made = [scenarios.oldest_first(n_tasks, every), scenarios.newest_first(n_tasks, every)]
    made += [scenarios.mid_task(n_tasks, 3, every), scenarios.at_random(n_tasks, seed / 99, seed)]
    if n_tasks > size:
        made.append(scenarios.bursts(n_tasks, size, size + 1))
    if n_tasks > every:
        made.append(scenarios.deadline(n_tasks, every, every))
    for scenario in made:
        assert all(remaining_after(scenario, n_tasks))


def test_listed_requests_are_used_unchanged():
    scenario = scenarios.listed(4, {1: [0], 3: [2]}, permanent=[3])
    assert (scenario.requests, scenario.permanent) == ({1: [0], 3: [2]}, (3,))
    assert remaining_after(scenario, 4)[-1] == (1, 3)
    with pytest.raises(RequestError, match="permanent"):
        scenarios.listed(4, {3: [0]}, permanent=[0]).on(tiny.blank(4))


def test_listed_requests_may_name_samples_and_classes():
    scenario = scenarios.listed(4, {1: [0], 3: {"task": 2, "samples": [1, 0]}})
    part = UnlearningRequest(task=2, samples=[0, 1], at=3)
    assert [e.requests for e in scenario.on(tiny.blank(4)).train_stream][3] == (part,)
    several = scenarios.listed(4, [{"task": 2, "classes": [0], "at": 3}, {"tasks": [0], "at": 3, "when": "before"}])
    assert [r.when for r in several.on(tiny.blank(4)).train_stream[3].requests] == ["before", "after"]


REFUSED = [
    (lambda: scenarios.listed(4, {1: 0}).on(tiny.blank(4)), "tasks"),
    (lambda: scenarios.listed(4, {"x": [0]}).on(tiny.blank(4)), "at must be an int of at least 0, got 'x'"),
    (lambda: scenarios.listed(4, [1]).on(tiny.blank(4)), "1 is no UnlearningRequest"),
    (lambda: scenarios.listed(4, {1: {"task": 0, "sample": [1]}}), "no option 'sample'; did you mean 'samples'?"),
    (lambda: scenarios.listed(4, {1: {"task": 0}}), "needs samples"),
    (lambda: scenarios.listed(4, permanent=3), r"permanent must be a list of tasks .* got 3"),
    (lambda: scenarios.published(1), "n_tasks must be an int of at least 2"),
    (lambda: scenarios.at_random(5, 1.5), r"rate must lie in \[0, 1\], got 1.5"),
    (lambda: scenarios.oldest_first(5, every=1), "every must be an int of at least 2"),
    (lambda: scenarios.bursts(5, size=3, every=3), "every must be an int of at least 4"),
    (lambda: scenarios.deadline(3, tasks=3), "n_tasks must be an int of at least 4"),
    (lambda: scenarios.relearn(3, tasks=[2], after=1), "trained by then"),
    (lambda: Scenario(order=(0, 3)).on(tiny.blank(3)), "positions 0 to 2"),
]


def test_wrong_requests_and_options_are_refused():
    for call, words in REFUSED:
        with pytest.raises((ValueError, TypeError), match=words):
            call()


def test_each_scenario_follows_its_rule():
    assert scenarios.published(5).requests == {1: [0], 3: [1], 4: [4]}
    published = {2: 1, 4: 2, 5: 5, 7: 6, 9: 7, 10: 10, 12: 11, 14: 12, 15: 15, 17: 16, 19: 17, 20: 20}
    assert scenarios.published(20).requests == {after - 1: [task - 1] for after, task in published.items()}
    assert scenarios.oldest_first(6).requests == {1: [0], 3: [1], 5: [2]}
    assert scenarios.newest_first(6).requests == {1: [1], 3: [3], 5: [5]}
    assert scenarios.bursts(7).requests == {2: [0, 1], 5: [2, 3]}
    last_moment = scenarios.deadline(6, tasks=3)
    assert (last_moment.requests, last_moment.deadline) == ({2: [0], 4: [2]}, 3)
    stays = scenarios.permanent(6)
    assert (stays.requests, stays.permanent) == ({2: [1], 4: [3]}, (0, 2, 4))
    assert scenarios.mid_task(4, 7).requests == (
        UnlearningRequest((0,), 1, "iteration", 7),
        UnlearningRequest((2,), 3, "iteration", 7),
    )
    again = scenarios.relearn(4, tasks=(1, 0), after=2)
    assert (again.requests, again.order) == ({2: [1, 0]}, (0, 1, 2, 3, 1, 0))
    assert remaining_after(again, 4) == [(0,), (0, 1), (2,), (2, 3), (2, 3, 1), (2, 3, 1, 0)]


def test_random_requests_depend_only_on_seed_and_rate():
    assert scenarios.at_random(9, 0.3, 1) == scenarios.at_random(9, 0.3, 1) != scenarios.at_random(9, 0.3, 2)
    assert scenarios.at_random(9, 0.0).requests == {}
    assert remaining_after(scenarios.at_random(5, 1.0), 5) == [(task,) for task in range(5)]
    counts = [len(scenarios.at_random(40, 0.02, seed).requested) for seed in range(20)]
    assert 8 < sum(counts) / len(counts) < 16  # 40 · 41 / 2 draws at .02 each, minus tasks unlearned before


def test_a_relearned_task_is_compared_with_a_model_that_learned_it_last(tmp_path):
    benchmark = scenarios.relearn(5).on(DIGITS)
    assert [e.task_label for e in without_requests(benchmark).train_stream] == list(range(5))
    measure_run("again", brief, benchmark, tmp_path, noise_floor=())
    *_, before, last = read_run(tmp_path).moments
    assert [seen.remaining for seen in (before, last)] == [(1, 2, 3, 4), (1, 2, 3, 4, 0)]
    assert set(last.accuracy) == {0, 1, 2, 3, 4}
    assert last.accuracy[0] > 0.8
    reference = References(brief, benchmark).reference([1, 2, 3, 4, 0])
    x, y = DIGITS.test_stream[0].tensors
    expected = (reference(x, 0).argmax(1) == y).double().mean().item()
    assert last.number("Accuracy_reference", 0) == pytest.approx(expected)


def test_requests_during_a_task_are_carried_out():
    strategy = learn(brief(), scenarios.mid_task(4, iteration=1).on(DIGITS).train_stream)
    records = unlearning_of(strategy).records
    assert [record.plan.tasks for record in records] == [(0,), (2,)]
    assert strategy.model.tasks == (1, 3, 4)
