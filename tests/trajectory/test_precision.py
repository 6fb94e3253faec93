"""Updates in lower precision are committed to the model: compared with a slow twin, and on real runs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.strategies import DIGITS, amnesiac, stock
from support.strategy_state import assert_economical, initial_values, trajectory, unlearning_plugin
from support.trajectory_oracle import EVENTS, SHAPES, DenseTwin, assert_same, drawn

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.trajectory import Trajectory

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


@pytest.mark.parametrize("dtype", CODES, ids=str)
@settings(max_examples=25, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 2**20))
@example(events=[("learn", 1.0), ("learn", 1.0), ("remove", {0}), ("learn", 0.5), ("remove", {1, 2})], seed=1)
def test_any_sequence_equals_the_slow_twin_to_the_bit(dtype, events, seed):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    store, twin = Trajectory(dtype=dtype), DenseTwin(state)
    for task, (kind, value) in enumerate(events):
        if kind == "learn":
            after = {name: state[name] + change for name, change in drawn(generator, value).items()}
            expected = {n: slowly_committed(state[n], after[n], dtype) for n in state}
            committed = {**after, **store.record(task, state, after)}
            assert_same(committed, expected)
            twin.record(task, state, expected)
            distance = torch.cat([(expected[n].double() - after[n].double()).reshape(-1) for n in state])
            row = store.report()[task]
            assert row["error_max"] == float(distance.abs().max())
            assert math.isclose(row["error_l2"], float(distance.norm()), rel_tol=1e-12, abs_tol=0.0)
            state = committed
        elif tasks := [task for task in store.tasks if task in value]:
            twin.remove(set(tasks))
            removal = store.remove(tasks, state)
            store.apply(removal)
            state = {name: removal.values.get(name, state[name]) for name in state}
            assert_same(state, twin.state)
    if store.tasks:
        everything = store.remove(store.tasks, state)
        assert_same({name: everything.values.get(name, state[name]) for name in state}, twin.initial)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_updates_that_no_code_can_represent_are_restored(dtype):
    before = {"w": torch.tensor([[1.0, 1.0, 0.0], [1e30, 0.1, 5.0]])}
    after = {"w": torch.tensor([[math.inf, math.nan, -0.0], [-1e30, 0.2, 5.0 + 1e-6]])}
    store = Trajectory(dtype=dtype)
    committed = {**after, **store.record(0, before, after)}
    assert same_bits(committed["w"][0, :2], after["w"][0, :2]).all()
    assert_same({"w": store.remove([0], committed).values["w"]}, before)


def test_a_dtype_that_saves_no_bytes_is_lossless():
    before, after = {"w": torch.randn(50).half()}, {"w": torch.randn(50).half()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        store = Trajectory(dtype=dtype)
        assert store.record(0, before, after) == {}
        assert torch.equal(store.remove([0], after).values["w"], before["w"])


def test_lower_precision_takes_fewer_bytes():
    generator = torch.Generator().manual_seed(0)
    before = {"w": torch.empty(100, 100).uniform_(-0.1, 0.1, generator=generator)}
    after = {"w": before["w"] + 0.03 * torch.randn(100, 100, generator=generator)}
    sizes = []
    for dtype in (None, torch.float16, torch.int8):
        store = Trajectory(dtype=dtype)
        store.record(0, before, after)
        sizes.append(store.nbytes() / 10_000)
    assert 3.5 > sizes[0] > sizes[1] + 0.5 > sizes[2] + 1.4


@pytest.mark.parametrize("dtype", [torch.int32, "int8"])
def test_another_dtype_is_refused(dtype):
    for make in (Trajectory, TrajectoryPlugin):
        with pytest.raises(ValueError, match=r"dtype must be one of torch.float32.*torch.int8.*got"):
            make(dtype=dtype)


# On real runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "adjustment"), [(torch.int8, "hat"), (torch.float16, "adahat")], ids=str)
def test_a_log_in_lower_precision_leaves_no_residue_and_keeps_the_claim(monkeypatch, dtype, adjustment):
    trained = {}
    record = Trajectory.record

    def watched(self, task, before, after, **more):
        trained.update({name: value.detach().clone() for name, value in after.items()})
        return record(self, task, before, after, **more)

    monkeypatch.setattr(Trajectory, "record", watched)
    strategy = amnesiac(trajectory=TrajectoryPlugin(dtype=dtype), adjustment=adjustment, optimizer="sgd")
    lossless = amnesiac(adjustment=adjustment, optimizer="sgd")
    initial = initial_values(strategy.model)
    for experience in DIGITS.train_stream[:3]:
        lossless.train(experience)
        strategy.train(experience)
        row = trajectory(strategy).report()[experience.task_label]
        distance = torch.cat(
            [(p.detach().double() - trained[n].double()).reshape(-1) for n, p in strategy.model.named_parameters()]
        )
        assert row["error_max"] == float(distance.abs().max()) > 0
        assert math.isclose(row["error_l2"], float(distance.norm()), rel_tol=1e-9)
    assert_economical(strategy, lossless, initial)


def test_a_dense_log_in_int8_removes_the_last_task_to_the_bit():
    strategy = stock(plugins=())
    find_plugin(strategy, TrajectoryPlugin).trajectory = Trajectory(dtype=torch.int8)
    strategy.train(DIGITS.train_stream[0])
    before = {n: p.detach().clone() for n, p in strategy.model.named_parameters() if "heads" not in n}
    strategy.train(DIGITS.train_stream[1])
    report = trajectory(strategy).report()
    assert all(row["bytes_per_parameter"] < 2 for row in report.values())
    assert all(row["share"] <= 1 for row in report.values())
    unlearning_plugin(strategy).unlearn(strategy, [1])
    parameters = dict(strategy.model.named_parameters())
    assert all(same_bits(parameters[name].detach(), value).all() for name, value in before.items())
