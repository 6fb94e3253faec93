"""Random lives of every strategy: trainings, requests and failures in any order, with all promises checked."""

import pytest
from avalanche.training.plugins import EWCPlugin
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import examples
from support.scenario import BATCHES, TASKS, Scenario
from support.scenario_strategies import KINDS, NETS

from avalanche_amnesia.benchmarks import UnlearningRequest
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.removal import ChangedEntries
from avalanche_amnesia.unlearning import applying
from avalanche_amnesia.unlearning.purging import purgers

STEPS = [
    *((Trajectory, "apply"), (Trajectory, "remove"), (ChangedEntries, "remove_from")),
    *((MaskedModel, "remove_task"), (TaskLedger, "forget"), (TaskLedger, "check")),
    *((applying, "remove_task_modules"), (applying, "_purge_optimizer"), (applying, "model_hashes")),
    *((applying, "UnlearningRecord"), (applying, "_update_snapshot")),
    *((CounterfactualPlugin, "compensate"), (purgers._PURGERS, EWCPlugin)),
]
"""Owner and name of functions that an unlearning calls, from its check to its record."""


def failures(*events: str) -> st.SearchStrategy:
    """A step of an unlearning that fails, or an event of the host; mostly neither."""
    step = st.tuples(st.sampled_from(STEPS), st.booleans()).map(lambda drawn: ((*drawn[0], drawn[1]), None))
    event = st.tuples(st.sampled_from(events), st.integers(0, BATCHES - 1)).map(lambda drawn: (None, drawn))
    return st.one_of(st.just((None, None)), st.just((None, None)), step, event)


CHOICE = st.lists(st.integers(0, 7), min_size=1, max_size=2)
"""Numbers that name tasks by their place among those that a request may name, or are wrong."""
INSIDE = ("before_unlearning", "after_unlearning")
AROUND = ("before_training_exp", "before_forward", "after_update", "after_training_epoch", "after_training_exp")
TRAIN = st.tuples(
    st.just("train"),
    st.integers(0, TASKS - 1),
    st.none() | st.tuples(CHOICE, st.sampled_from(["before", "iteration", "after"]), st.integers(0, BATCHES - 1)),
    failures(*INSIDE, *AROUND),
)
EVENTS = st.one_of(
    TRAIN,
    TRAIN,
    st.tuples(st.just("request"), CHOICE, failures(*INSIDE)),
    st.tuples(st.just("request"), CHOICE, failures(*INSIDE)),
    st.tuples(st.just("permanent"), CHOICE),
    st.tuples(st.just("evaluate")),
)
SCENARIOS = st.lists(EVENTS, min_size=4, max_size=9)


def tasks_of(choice: list[int], tasks: list[int]) -> tuple[int, ...]:
    """Mostly tasks that may be named; a larger number is kept, and may be no task."""
    return tuple(dict.fromkeys(tasks[number] if number < len(tasks) else number % TASKS for number in choice))


def perform(scenario: Scenario, event: tuple) -> None:
    oracle = scenario.oracle
    match event:
        case "train", number, request, (step, failure):
            new = [task for task in range(TASKS) if task not in oracle.order] or list(range(TASKS))
            task = new[number % len(new)]
            if request is not None:
                choice, when, iteration = request
                known = oracle.unlearnable + [task] * (when == "after")
                request = UnlearningRequest(
                    tasks_of(choice, known), task, when, iteration if when == "iteration" else None
                )
            scenario.train(task, request, step, failure)
        case "request", choice, (step, failure):
            scenario.request(tasks_of(choice, oracle.unlearnable), step, failure)
        case "permanent", choice:
            scenario.mark_permanent(tasks_of(choice, oracle.order))
        case _:
            scenario.evaluate()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Plugin .* implements incompatible callbacks")
@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=examples(4),  # of each kind
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a scenario takes long enough without shrinking it a hundred times
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    events=SCENARIOS,
    marked=st.booleans(),
    net=st.sampled_from(sorted(NETS)),
    optimizer=st.sampled_from(["adam", "momentum", "adamw"]),
    deadline=st.sampled_from([None, None, 2]),
)
def test_promises_hold_after_every_event_of_a_random_life(kind, events, marked, net, optimizer, deadline):
    scenario = Scenario(KINDS[kind], marked=marked, net=net, optimizer=optimizer, deadline=deadline)
    scenario.train(0, None, None, None)
    scenario.train(1, None, None, None)
    for event in events:
        perform(scenario, event)
    scenario.request(tuple(scenario.oracle.unlearnable), None, None)  # without tasks every entry is initial again


def test_an_unlearning_that_changes_nothing_breaks_a_promise(monkeypatch):
    """The control of the scenarios above, whose checks lie in support.scenario."""
    monkeypatch.setattr(ChangedEntries, "remove_from", lambda *_: None)
    kind = KINDS["backup and repair"]
    scenario = Scenario(kind, marked=False, net=sorted(NETS)[0], optimizer="adam", deadline=None)
    scenario.train(0, None, None, None)
    scenario.train(1, None, None, None)
    with pytest.raises(AssertionError):
        scenario.request((1,), None, None)
