"""The tasks that wrote one tensor are undone and replayed, compared entry by entry with Python floats."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory.removal import moved_along, replay, wind_back
from avalanche_amnesia.trajectory.sparse import SparseValues
from avalanche_amnesia.trajectory.undo_log import Log, Updates

SIZE = 7
TASKS = st.lists(st.sets(st.integers(0, SIZE - 1)), min_size=1, max_size=5)
"""Changed entries of every task."""


def histories(moved, seed):
    """Return the values before the first task and after each task, and each task's undo log."""
    generator = torch.Generator().manual_seed(seed)
    values, entries = [torch.randn(SIZE, generator=generator)], []
    for chosen in moved:
        where = torch.zeros(SIZE, dtype=torch.bool)
        where[list(chosen)] = True
        entries.append(SparseValues.of(values[-1], where))
        values.append(torch.where(where, values[-1] + torch.randn(SIZE, generator=generator), values[-1]))
    return values, entries


def replayed(values, entries, gone, reading=None):
    """Return the result of :func:`replay` without some tasks, the new logs, and the updates of the removed tasks."""
    logs = {task: Log({"w": entry}, SIZE, {}) for task, entry in enumerate(entries) if task not in gone}
    updates = {task: Updates() for task in gone}
    result = replay("w", values[-1], list(enumerate(entries)), logs, updates, reading or {}, {})
    return *result, logs, updates


@given(moved=TASKS, seed=st.integers(0, 2**20))
def test_undoing_all_tasks_ends_at_the_first_values_and_lists_every_write(moved, seed):
    values, entries = histories(moved, seed)
    value = values[-1].clone()
    steps = wind_back(value, [*enumerate(entries), (9, None)])
    assert same_bits(value, values[0]).all()
    assert [task for task, *_ in steps] == list(reversed(range(len(moved))))
    for task, entry, index, old, written in steps:
        assert entry is entries[task]
        assert index.tolist() == sorted(moved[task])
        assert same_bits(old, values[task][index]).all()
        assert same_bits(written, values[task + 1][index]).all()


@settings(deadline=None)
@given(moved=TASKS, seed=st.integers(0, 2**20), gone=st.sets(st.integers(0, 4)))
def test_a_remaining_task_writes_its_bits_on_an_equal_value_and_adds_its_update_to_another(moved, seed, gone):
    values, entries = histories(moved, seed)
    gone &= set(range(len(moved)))
    value, stays, logs, updates = replayed(values, entries, gone)
    expected, befores = values[0].tolist(), {}
    for task, chosen in enumerate(moved):
        if task in gone:
            continue
        befores[task] = [expected[entry] for entry in sorted(chosen)]
        for entry in chosen:
            old, new = float(values[task][entry]), float(values[task + 1][entry])
            total = torch.tensor(expected[entry] + (new - old), dtype=torch.float64).float()
            expected[entry] = new if expected[entry] == old else float(total)
    assert value.tolist() == expected
    assert not stays.any()
    assert {task: log["w"].values.tolist() for task, log in logs.items()} == befores
    for task in gone:
        difference = values[task + 1].double() - values[task].double()
        assert torch.equal(updates[task]["w"], difference)
        assert updates[task].where("w").nonzero().flatten().tolist() == sorted(moved[task])


def test_an_entry_that_a_remaining_task_reads_is_not_removed_and_belongs_to_the_reader():
    values, entries = histories([{0, 1}, {5}], seed=0)
    reads = torch.tensor([True, *[False] * 6])
    value, stays, logs, updates = replayed(values, entries, {0}, {1: reads})
    assert torch.equal(stays, reads)
    assert value[0] == values[1][0]
    assert value[1] == values[0][1]
    assert updates[0]["w"][0] == 0.0  # the entry is not removed
    assert logs[1]["w"].where.nonzero().flatten().tolist() == [0, 5]
    assert logs[1]["w"].values[0] == values[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_task_in_training_keeps_its_own_update(dtype):
    before = torch.tensor([1.0, 2.0, -0.0], dtype=dtype)
    current = torch.tensor([1.5, 2.0, -0.0], dtype=dtype)
    new_before = torch.tensor([4.0, 0.25, 0.0], dtype=dtype)
    moved = moved_along(current, before, new_before)
    assert same_bits(moved, torch.tensor([4.5, 0.25, 0.0], dtype=dtype)).all()
