"""Plans of the slots of weight pools, made from the requests of a stream."""

import warnings
from functools import partial

import pytest
from support.strategies import make
from support.strategy_state import same_state
from torch.optim import Adam

from avalanche_amnesia import DisjointSubnets, Pools, References, SplitDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.streams.scenarios import Scenario
from avalanche_amnesia.isolation.pools import CapacityError, CapacityWarning, StreamLayout
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.saving import load_state

DIGITS = SplitDigits(n_tasks=5, n_train=200, seed=2)
PUBLISHED = {1: [0], 3: [1], 4: [4]}


def fresh(isolation, **options):
    options = {"train_mb_size": 10, "train_epochs": 1, "torch_seed": 2, "seed": 2, **options}
    return make(
        DisjointSubnets, hidden=(48,), features=30, optimizer=partial(Adam, lr=3e-3), isolation=isolation, **options
    )


def learn(benchmark, isolation, tasks=range(5)):
    """Return a strategy that trained these tasks, and its warnings about capacity."""
    strategy = fresh(isolation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for task in tasks:
            strategy.train(benchmark.train_stream[task])
    return strategy, [str(w.message) for w in caught if w.category is CapacityWarning]


def test_the_slot_of_an_unlearned_task_is_used_again():
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
def test_a_slot_is_free_for_a_training_that_starts_after_the_request(request_, third):
    slots = Pools.planned(with_unlearning(DIGITS, [request_])).slots
    assert [slots[0], slots[1], slots[2]] == [0, 1, third]


def test_a_task_without_a_slot_names_the_requests_that_were_not_obeyed():
    benchmark = with_unlearning(DIGITS, {0: [0]})
    strategy = fresh(Pools.planned(benchmark))
    unlearning_of(strategy).obey = False
    with pytest.raises(CapacityError, match=r"though the stream requests to unlearn \[0\] before"):
        strategy.train(benchmark.train_stream)


def test_missing_slots_are_reported_before_the_first_task():
    _, told = learn(DIGITS, Pools(slots=3), [0, 1, 2])
    assert len(told) == 1
    assert told[0].startswith("task 3 will find its slot (0 of 3) taken by tasks [0]: unlearn")
    assert "Pools.planned" in told[0]
    late = with_unlearning(DIGITS, deadline=2)
    assert "of which [0] can't be unlearned any more by then" in learn(late, Pools(slots=3), [0])[1][0]
    assert learn(with_unlearning(DIGITS, PUBLISHED), Pools(slots=3), [0])[1] == []


def test_the_slot_of_a_permanent_task_is_not_used_again():
    benchmark = with_unlearning(DIGITS, {2: [1]}, permanent=[0, 3])
    pools = Pools.planned(benchmark)
    assert pools.slots == {0: 0, 1: 1, 2: 2, 3: 3, 4: 1}
    strategy, told = learn(benchmark, pools)
    assert told == []
    assert strategy.model.tasks == (0, 2, 3, 4)


def test_a_repeated_task_keeps_its_slot():
    again = Scenario({1: [0]}, order=(0, 1, 0, 2)).on(DIGITS)
    assert Pools.planned(again).slots == {0: 0, 1: 1, 2: 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CapacityWarning)
        strategy = fresh(Pools.planned(again))
        for experience in again.train_stream:
            strategy.train(experience)
    layout = StreamLayout.make(again.train_stream[3], None, deadline=1)
    assert not layout.can_be_read(0, later=2)  # learned again just before
    assert layout.can_be_read(1, later=2)


def test_saved_slots_are_compared(tmp_path):
    slots = {0: 0, 1: 1, 2: 0, 3: 2, 4: 1}
    strategy, _ = learn(with_unlearning(DIGITS, PUBLISHED), Pools(slots=slots), [0])
    strategy.save(tmp_path / "state")
    for others in (None, 3, {**slots, 4: 0}):
        with pytest.raises(StateError, match=r"DisjointPlugin.isolation.slots.*build the strategy with those"):
            load_state(fresh(Pools(slots=others)), tmp_path / "state")
    same = fresh(Pools(slots=slots))
    load_state(same, tmp_path / "state")
    assert same.model.tasks == (0,)


def test_the_reference_without_unlearning_has_a_pool_for_every_task():
    benchmark = with_unlearning(DIGITS, PUBLISHED)
    dealt, plain = (References(partial(fresh, pools), benchmark) for pools in (Pools.planned(benchmark), Pools()))
    assert same_state(dealt.full(5).state_dict(), plain.full(5).state_dict())
    assert not same_state(dealt.reference([2, 3]).state_dict(), plain.reference([2, 3]).state_dict())


def test_every_task_needs_a_slot():
    with pytest.raises(CapacityError, match=r"task 2 has no slot: Pools\(slots=…\) names those of \[0, 1\]"):
        learn(DIGITS, Pools(slots={0: 0, 1: 1}))
    for slots in ({}, {0: -1}, {"a": 0}, {0: 0.5}):
        with pytest.raises(ValueError, match="slots must name a slot"):
            Pools(slots=slots)
