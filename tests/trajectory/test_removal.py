"""Removals by the undo logs equal a dense twin that keeps every state and every update, also after merges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.strategy_state import frozen
from support.trajectory_oracle import EVENTS, SHAPES, DenseTwin, assert_same, drawn, recorded

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.removal import Revision

CODES = (torch.float16, torch.bfloat16, torch.int8)


def slowly_committed(before, after, dtype):
    """Commit entry by entry in Python floats; a vector is one row."""
    result = after.clone()
    rows = [before.shape[0], -1] if before.ndim > 1 else [1, -1]
    for old, new, out in zip(*(t.reshape(rows) for t in (before, after, result)), strict=True):
        kept = [float(new[i]) - float(old[i]) for i in range(len(old))]
        scale = float(torch.tensor(max(map(abs, kept)) / 127, dtype=torch.float64).bfloat16())
        for i, delta in enumerate(kept):
            if dtype is torch.int8:
                delta = max(-127, min(127, round(delta / scale))) * scale if scale else 0.0
            else:
                delta = float(torch.tensor(delta, dtype=torch.float64).to(dtype))
            out[i] = old[i] if delta == 0 else float(np.float32(float(old[i]) + delta))
    return result


@pytest.mark.parametrize("dtype", [None, *CODES], ids=str)
@settings(max_examples=40, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 2**20), in_training=st.booleans())
@example([("learn", 1.0), ("learn", 1.0), ("remove", {0}), ("learn", 0.5), ("remove", {1, 2})], 1, False)
def test_any_sequence_of_tasks_and_removals_equals_the_dense_twin(dtype, events, seed, in_training):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    store, twin = Trajectory(dtype=dtype), DenseTwin(state)
    ever: list[int] = []
    for kind, value in events:
        if kind == "learn":
            relearnable = [task for task in ever if task not in store.tasks]
            task = relearnable[0] if relearnable and value > 0.7 else len(ever)
            ever.append(task) if task not in ever else None
            after = {name: state[name] + change for name, change in drawn(generator, value).items()}
            committed = {**after, **store.record(task, state, after)}
            if dtype is not None:
                assert_same(committed, {name: slowly_committed(state[name], after[name], dtype) for name in state})
            row = store.report()[task]
            distance = torch.cat([(committed[n].double() - after[n].double()).reshape(-1) for n in state])
            assert row["error_max"] == float(distance.abs().max())
            assert math.isclose(row["error_l2"], float(distance.norm()), rel_tol=1e-12, abs_tol=0.0)
            twin.record(task, state, committed)
            state = committed
            continue
        if not (tasks := [task for task in store.tasks if task in value]):
            continue
        logs = frozen([(t, {n: (e.chosen, e.values) for n, e in log.items()}) for t, log in store.logs.items()])
        twin.remove(set(tasks))
        if in_training:
            running = {name: state[name] + change for name, change in drawn(generator, 0.5).items()}
            removal = store.remove(tasks, running, state)
            moved_back = {name: removal.before.get(name, state[name]) for name in state}
            now = {name: removal.values.get(name, running[name]) for name in state}
            for name in state:  # the task in training keeps its own update
                own = running[name].double() - state[name].double()
                untouched = same_bits(running[name], state[name])
                expected = torch.where(untouched, moved_back[name], (moved_back[name].double() + own).float())
                same_ground = same_bits(moved_back[name], state[name])
                assert same_bits(now[name], torch.where(same_ground, running[name], expected)).all()
        else:
            removal = store.remove(tasks, state)
            assert removal.before == {}
            moved_back = {name: removal.values.get(name, state[name]) for name in state}
        assert logs == frozen([(t, {n: (e.chosen, e.values) for n, e in lg.items()}) for t, lg in store.logs.items()])
        store.apply(removal)
        state = moved_back
        assert_same(state, twin.state)
        assert store.tasks == tuple(task for task, *_ in twin.writers)
    # a log holds the twin's values before the task, for entries that the task changed
    for (task, moved, _, _), before in zip(twin.writers, twin._states_before(), strict=True):
        for name, entry in store.logs[task].items():
            assert torch.equal(entry.where, moved[name])
            assert dtype is not None or same_bits(entry.values, before[name][moved[name]]).all()
    if store.tasks:
        everything = store.remove(store.tasks, state)
        assert_same({name: everything.values.get(name, state[name]) for name in state}, twin.initial)


def test_a_task_keeps_its_bits_if_the_value_before_it_did_not_change():
    """Subtraction and addition would not restore a sign of zero, or a much smaller number."""
    store, s = recorded([0.0, 0.0, 1e30], [1.0, 0.0, 1e30], [1.0, -0.0, 1e-5])
    without_0 = store.remove([0], s[2]).values["w"]
    assert torch.signbit(without_0).tolist() == [False, True, False]
    assert torch.equal(without_0, torch.tensor([0.0, 0.0, 1e-5]))


def test_an_update_is_revised_in_a_tensor_without_removals_too():
    store, zero = Trajectory(), {"a": torch.zeros(2), "w": torch.zeros(2)}
    first = {"a": torch.ones(2), "w": zero["w"]}
    second = {"a": first["a"], "w": torch.tensor([2.0, 4.0])}
    store.record(0, zero, first)
    store.record(1, first, second)
    half = Revision(torch.tensor([True, False]), factor=0.5)
    removal = store.remove([0], second, revisions={1: {"w": half}})
    assert {name: value.tolist() for name, value in removal.values.items()} == {"a": [0, 0], "w": [1, 4]}
    store.apply(removal)
    assert store.remove([1], dict(removal.values)).values["w"].tolist() == [0, 0]


def test_an_entry_that_a_remaining_task_reads_is_not_removed_and_belongs_to_the_reader():
    store, s = recorded([0.0, 0.0, 0.0], [1.0, 2.0, 0.0], [1.0, 2.0, 3.0])
    removal = store.remove([0], s[2], readers={1: {"w": torch.tensor([True, False, False])}})
    assert removal.values["w"].tolist() == [1, 0, 3]
    store.apply(removal)
    assert store.logs[1]["w"].where.tolist() == [True, False, True]
    assert store.remove([1], dict(removal.values)).values["w"].tolist() == [0, 0, 0]
