"""Merged updates of permanent tasks: every removal that is still allowed stays possible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import DIGITS, amnesiac, learn
from support.strategy_state import bits, trajectory, unlearning_plugin
from support.trajectory_oracle import LEARN, SHAPES, drawn, recorded

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.log_files import TrajectoryError

REMOVE, MERGE = (st.tuples(st.just(kind), st.sets(st.integers(0, 9), max_size=3)) for kind in ("remove", "merge"))


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(LEARN | REMOVE | MERGE, min_size=3, max_size=12),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([None, torch.float16, torch.int8]),
)
def test_removals_equal_those_without_merging(events, seed, dtype):
    """Entries that merged tasks wrote differ by rounding only; all other entries are equal to the bit."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    initial = {name: value.clone() for name, value in state.items()}
    merging, apart = Trajectory(dtype=dtype), Trajectory(dtype=dtype)
    wrote = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in SHAPES.items()}  # merged tasks
    other = {name: value.clone() for name, value in state.items()}
    merged: set[int] = set()
    for task, (kind, value) in enumerate(events):
        if kind == "learn":
            change = drawn(generator, value)
            committed = []
            for store, values in ((merging, state), (apart, other)):
                after = {name: values[name] + change[name] for name in values}
                committed.append({**after, **store.record(task, values, after)})
            state, other = committed
        elif kind == "merge":
            new = value & set(merging.tasks)
            before = merging.nbytes()
            for gone in new - merged:
                for name, where in apart.moved(gone).items():
                    wrote[name] |= where
            merged |= new
            merging.merge(new)
            assert merging.nbytes() <= before
        elif tasks := [task for task in merging.tasks if task in value - merged]:
            removals = merging.remove(tasks, state), apart.remove(tasks, other)
            merging.apply(removals[0])
            apart.apply(removals[1])
            state = {name: removals[0].values.get(name, state[name]) for name in state}
            other = {name: removals[1].values.get(name, other[name]) for name in other}
        assert merging.tasks == apart.tasks
        for name in state:
            assert torch.allclose(state[name], other[name], atol=1e-5)
            assert same_bits(state[name], other[name])[~wrote[name]].all()
    rest = [task for task in merging.tasks if task not in merged]
    if rest:
        values = merging.remove(rest, state).values
        for name in state:
            nobody = ~wrote[name]
            assert same_bits(values.get(name, state[name]), initial[name])[nobody].all()


def test_merged_logs_keep_only_entries_that_an_earlier_removal_needs():
    store, s = recorded([0.0, 0.0], [1.0, 0.0], [3.0, 3.0], [7.0, 7.0], [15.0, 15.0], [31.0, 31.0])
    store.merge([1, 2, 4])  # 0 and 3 may still be removed; 0 wrote only the first entry, 3 wrote both
    assert [log["w"].where.tolist() if log else [] for log in store.logs.values()] == [
        [True, False],  # 0
        [True, False],  # 1: the removal of 0 needs it
        [],  # 2: the log of 1 serves both
        [True, True],  # 3
        [True, True],  # 4: the removal of 3 needs it
    ]
    assert store.remove([0], s[5]).values["w"].tolist() == [30.0, 31.0]
    assert store.remove([3], s[5]).values["w"].tolist() == [23.0, 23.0]
    assert store.remove([0, 3], s[5]).values["w"].tolist() == [22.0, 23.0]
    store.apply(store.remove([3], s[5]))
    assert list(store.logs[4]) == []  # now the log of 1 serves 4 too
    assert store.remove([0], {"w": torch.tensor([23.0, 23.0])}).values["w"].tolist() == [22.0, 23.0]


def test_merged_tasks_can_not_be_removed():
    store, s = recorded([0.0], [1.0], [2.0])
    store.merge([0])
    assert [row["merged"] for row in store.report().values()] == [True, False]
    with pytest.raises(TrajectoryError, match=r"tasks \[0\] can't be taken out.*merge_permanent=False"):
        store.remove([0, 1], s[2])
    with pytest.raises(TrajectoryError, match="task 7 is not recorded"):
        store.merge([7])


def sizes_of_logs(strategy):
    return {task: row["bytes"] for task, row in trajectory(strategy).report().items()}


def test_a_run_with_a_deadline_keeps_only_logs_of_removable_tasks():
    runs = [
        amnesiac(unlearning=UnlearningPlugin(deadline=2), trajectory=TrajectoryPlugin(merge_permanent=merge))
        for merge in (True, False)
    ]
    for strategy in runs:
        learn(strategy, DIGITS.train_stream[:5])
        assert unlearning_plugin(strategy).ledger.permanent == {0, 1, 2}
    sizes = [sizes_of_logs(strategy) for strategy in runs]
    assert list(sizes[0]) == [0, 1, 2, 3, 4]
    assert list(sizes[0].values())[:3] == [0, 0, 0] < list(sizes[1].values())[:3]
    for strategy in runs:
        strategy.unlearn([3])
    assert bits(runs[0].model) == bits(runs[1].model)
