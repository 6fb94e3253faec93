"""Slots planned from the requests of a stream."""

import warnings

import pytest
import torch
from torch.optim import Adam

from avalanche_amnesia.benchmarks import SplitDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.requests import without_requests
from avalanche_amnesia.isolation import CapacityError, CapacityWarning, Pools
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT

DIGITS = SplitDigits(n_tasks=5, n_train=500, seed=2)
PUBLISHED = {1: [0], 3: [1], 4: [4]}


def learn(benchmark, isolation, tasks=range(5), deadline=None):
    """A strategy that trained some of the tasks, and its warnings of capacity."""
    torch.manual_seed(2)
    model = MaskedModel(MLP(64, hidden=(48,), features=30))
    strategy = AmnesiacHAT(
        model=model, optimizer=Adam(model.parameters(), lr=3e-3), isolation=isolation, train_epochs=3, seed=2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for task in tasks:
            strategy.train(benchmark.train_stream[task])
    return strategy, [str(w.message) for w in caught if w.category is CapacityWarning]


def test_a_slot_is_taken_again_once_its_task_is_gone():
    assert Pools.planned(with_unlearning(DIGITS, PUBLISHED)).slots == {0: 0, 1: 1, 2: 0, 3: 2, 4: 1}
    assert Pools.planned(DIGITS).slots == {task: task for task in range(5)}


@pytest.mark.parametrize(
    ("request_", "third"),
    [
        (UnlearningRequest((0,), at=2, when="before"), 0),
        (UnlearningRequest((0,), at=2, when="iteration", iteration=3), 2),
        (UnlearningRequest((0,), at=2), 2),
    ],
)
def test_it_is_free_for_the_training_that_begins_behind_the_request(request_, third):
    slots = Pools.planned(with_unlearning(DIGITS, [request_])).slots
    assert [slots[0], slots[1], slots[2]] == [0, 1, third]


@pytest.mark.parametrize("moving", [False, True])
def test_what_remains_is_the_model_that_never_saw_the_others(moving):
    benchmark = with_unlearning(DIGITS, PUBLISHED)
    pools = Pools.planned(benchmark, moving=moving)
    strategy, told = learn(benchmark, pools)
    assert told == []
    assert strategy.model.tasks == (2, 3)
    of_each = strategy.model.masks[2]["layers.0"].sum()
    assert 48 / 5 < of_each <= 48 / 3
    retrained, _ = learn(without_requests(benchmark), pools, [2, 3])
    there, wanted = strategy.model.state_dict(), retrained.model.state_dict()
    assert there.keys() == wanted.keys()
    assert all(torch.equal(there[name], wanted[name]) for name in wanted)


def test_slots_that_run_out_are_told_of_before_the_first_task():
    with pytest.raises(CapacityError, match="task 3 finds its pool"):
        learn(DIGITS, Pools(slots=3))
    _, told = learn(DIGITS, Pools(slots=3), [0, 1, 2])
    assert len(told) == 1
    assert told[0].startswith("task 3 will find one of the 3 slots taken by tasks [0], unless")
    assert "Pools.planned" in told[0]
    late = with_unlearning(DIGITS, deadline=2)
    assert "of which [0] can't be unlearned any more by then" in learn(late, Pools(slots=3), [0])[1][0]
    assert learn(with_unlearning(DIGITS, PUBLISHED), Pools(slots=3), [0])[1] == []
    assert learn(DIGITS, Pools(slots=3, when_full="share"), [0])[1] == []


def test_every_task_needs_a_slot():
    with pytest.raises(CapacityError, match=r"task 2 has no slot: Pools\(slots=…\) names those of \[0, 1\]"):
        learn(DIGITS, Pools(slots={0: 0, 1: 1}))
    for slots in ({}, {0: -1}, {"a": 0}, {0: 0.5}):
        with pytest.raises(ValueError, match="slots must name a slot"):
            Pools(slots=slots)
