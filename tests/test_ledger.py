"""The task ledger: order of tasks, permanent tasks, deadlines, refused requests, saved states."""

import json
from copy import copy, deepcopy

import pytest

from avalanche_amnesia.ledger import RequestError, TaskLedger


def ledger_of(*tasks: int, deadline: int | None = None) -> TaskLedger:
    ledger = TaskLedger(deadline)
    for task in tasks:
        ledger.learn(task)
    return ledger


def test_tasks_are_listed_in_order_and_a_task_learned_again_is_a_new_one():
    ledger = ledger_of(5, 2, 9, 0)
    ledger.forget([9, 5])
    ledger.forget([0])
    assert (ledger.remaining, ledger.unlearned, ledger.n_trained) == ((2,), (9, 5, 0), 4)
    ledger.learn(5)
    assert (ledger.remaining, ledger.unlearned, ledger.saw(5)) == ((2, 5), (9, 0), {2})
    ledger.forget([2])
    assert ledger.saw(5) == {2}  # it remained at that time
    with pytest.raises(RequestError, match="does not remain; remaining are 5"):
        ledger.saw(2)
    with pytest.raises(RequestError, match="training of task 5: it is already trained and still remains"):
        ledger.learn(5)
    assert ledger.n_trained == 5


def test_a_permanent_task_can_not_be_unlearned():
    ledger = ledger_of(0, 1, 2)
    ledger.learn(3, permanent=True)
    ledger.declare_permanent([1])
    ledger.declare_permanent([1])
    assert ledger.permanent == {1, 3}
    assert ledger.unlearnable == (0, 2)
    with pytest.raises(RequestError, match=r"after task 3: task 1 .* it was declared permanent"):
        ledger.forget([0, 1], "after task 3")
    assert ledger.remaining == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([0, 7], "task 7 does not remain; remaining are 0"),
        ([1], "task 1 does not remain; remaining are 0"),
        (["0"], r"\['0'\] are no tasks; give a list of ints"),
        ([True], r"\[True\] are no tasks; give a list of ints"),
    ],
)
def test_only_remaining_tasks_can_be_declared_permanent_and_all_or_none_are(tasks, message):
    ledger = ledger_of(0, 1)
    ledger.forget([1])
    with pytest.raises(RequestError, match=message):
        ledger.declare_permanent(tasks)
    assert ledger.permanent == frozenset()


def test_the_deadline_counts_all_later_trainings():
    ledger = ledger_of(0, 1, deadline=2)
    assert ledger.permanent == frozenset()
    ledger.forget([1])
    ledger.learn(2)
    assert ledger.permanent == {0}
    with pytest.raises(RequestError, match=r"task 0 .* deadline has expired \(2 further tasks trained\)"):
        ledger.forget([0])
    assert ledger.unlearnable == (2,)


@pytest.mark.parametrize("value", ["1", 1.5, True, None, 0, -1])
def test_a_task_and_a_deadline_must_be_ints(value):
    if value not in (0, -1):
        with pytest.raises(RequestError, match="a task is an int"):
            TaskLedger().learn(value)
    if value is not None:
        with pytest.raises(RequestError, match="deadline="):
            TaskLedger(value)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([0.0], r"\[0.0\] are no tasks"),
        ([[0]], "are no tasks"),
        (3, "must be a list of tasks .* got 3"),
        (None, "must be a list of tasks .* got None"),
        ([0, 1], "task 1 .* it is already unlearned"),  # other broken rules: test_unlearning_requests.py
    ],
)
def test_a_bad_request_names_event_and_rule_and_changes_nothing(tasks, message):
    ledger = ledger_of(0, 1, 2)
    ledger.forget([1])
    before = ledger.state_dict()
    for ask in (ledger.check, ledger.forget):
        with pytest.raises(RequestError, match=f"^before task 3: .*{message}"):
            ask(tasks, "before task 3", known={0, 1, 2, 3})
    assert ledger.state_dict() == before


def test_the_state_survives_json_and_deepcopy():
    ledger = ledger_of(4, 0, 1, 2, deadline=3)
    ledger.forget([0])
    ledger.declare_permanent([2])
    loaded = TaskLedger()
    loaded.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    for twin in (loaded, deepcopy(ledger)):
        twin.learn(7)
        assert twin.remaining == (4, 1, 2, 7)
        assert twin.unlearned == (0,)
        assert twin.permanent == {4, 2}
        assert twin.saw(7) == {4, 1, 2}
        assert twin.saw(1) == {4, 0}
        assert (twin.deadline, twin.n_trained) == (3, 5)
    assert ledger.remaining == (4, 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: ledger.learn(7),
        lambda ledger: ledger.learn(0),
        lambda ledger: ledger.forget([1]),
        lambda ledger: ledger.declare_permanent([4]),
    ],
    ids=["a new task", "a task again", "an unlearning", "a declaration"],
)
def test_a_change_of_a_copy_does_not_change_the_ledger(change):
    ledger = ledger_of(4, 0, 1, deadline=3)
    ledger.forget([0])
    before, twin = ledger.state_dict(), copy(ledger)
    change(twin)
    assert twin.state_dict() != before
    assert ledger.state_dict() == before


GOOD = ledger_of(0, 1).state_dict()
BROKEN = [{}, [], *({**GOOD, "unlearned": value} for value in ([1], [1.5])), {**GOOD, "n_trained": "2"}]
BROKEN += [{**GOOD, "remaining": [{"task": 0}]}, {**GOOD, "deadline": 0}]


@pytest.mark.parametrize("state", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(state):
    ledger = ledger_of(3)
    before = ledger.state_dict()
    with pytest.raises(ValueError, match=r"invalid value in state|deadline"):
        ledger.load_state_dict(state)
    assert ledger.state_dict() == before
