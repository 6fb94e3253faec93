"""Economies are committed to the model: against a slow twin, and on real runs."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from avalanche.core import SupervisedPlugin
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.strategies import DIGITS, amnesiac, stock
from support.strategy_state import initial_values, stray, trajectory, unlearning_plugin
from support.trajectory_oracle import EVENTS, SHAPES, DenseTwin, assert_same, drawn, states

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import TrajectoryPlugin
from avalanche_amnesia.training.task_in_training import StepActivity
from avalanche_amnesia.trajectory import Trajectory, TrajectoryError

CODES = (torch.float16, torch.bfloat16, torch.int8)
FIDELITIES = [
    {"threshold": 0.5},
    {"min_active_steps": 0.5},
    *({"dtype": dtype} for dtype in CODES),
    {"threshold": 0.3, "min_active_steps": 0.3, "dtype": torch.int8},
]


def slowly_committed(before, after, active, threshold=0.0, min_active_steps=0.0, dtype=None):
    """Entry by entry in Python floats; ``(rows, columns)`` or a vector, which is one row."""
    result = after.clone()
    rows = [before.shape[0], -1] if before.ndim > 1 else [1, -1]
    for old, new, share, out in zip(*(t.reshape(rows) for t in (before, after, active, result)), strict=True):
        kept = []
        for i in range(len(old)):
            delta = float(new[i]) - float(old[i])
            kept.append(0.0 if abs(delta) < threshold or float(share[i]) < min_active_steps else delta)
        scale = float(torch.tensor(max(map(abs, kept)) / 127, dtype=torch.float64).bfloat16())
        for i, delta in enumerate(kept):
            if dtype is torch.int8:
                delta = max(-127, min(127, round(delta / scale))) * scale if scale else 0.0
            elif dtype is not None:
                delta = float(torch.tensor(delta, dtype=torch.float64).to(dtype))
            unchanged = delta == 0 or (dtype is None and delta == float(new[i]) - float(old[i]))
            out[i] = (old[i] if delta == 0 else new[i]) if unchanged else float(np.float32(float(old[i]) + delta))
    return result


@pytest.mark.parametrize("options", FIDELITIES, ids=str)
@settings(max_examples=25, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 2**20))
@example(events=[("learn", 1.0), ("learn", 1.0), ("remove", {0}), ("learn", 0.5), ("remove", {1, 2})], seed=1)
def test_any_sequence_agrees_with_the_slow_twin_bit_for_bit(options, events, seed):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    store, twin = Trajectory(**options), DenseTwin(state)
    for task, (kind, value) in enumerate(events):
        if kind == "learn":
            after = {name: state[name] + change for name, change in drawn(generator, value).items()}
            active = {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
            expected = {n: slowly_committed(state[n], after[n], active[n], **options) for n in state}
            committed = {**after, **store.record(task, state, after, active)}
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
def test_updates_that_no_code_can_hold_stay_and_come_back(dtype):
    before = {"w": torch.tensor([[1.0, 1.0, 0.0], [1e30, 0.1, 5.0]])}
    after = {"w": torch.tensor([[math.inf, math.nan, -0.0], [-1e30, 0.2, 5.0 + 1e-6]])}
    store = Trajectory(dtype=dtype)
    committed = {**after, **store.record(0, before, after)}
    assert same_bits(committed["w"][0, :2], after["w"][0, :2]).all()
    assert_same({"w": store.remove([0], committed).values["w"]}, before)


def test_a_dtype_that_saves_nothing_leaves_the_store_lossless():
    before, after = {"w": torch.randn(50).half()}, {"w": torch.randn(50).half()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        store = Trajectory(dtype=dtype)
        assert store.record(0, before, after) == {}
        assert torch.equal(store.remove([0], after).values["w"], before["w"])


def test_codes_take_fewer_bytes():
    generator = torch.Generator().manual_seed(0)
    before = {"w": torch.empty(100, 100).uniform_(-0.1, 0.1, generator=generator)}
    after = {"w": before["w"] + 0.03 * torch.randn(100, 100, generator=generator)}
    sizes = []
    for dtype in (None, torch.float16, torch.int8):
        store = Trajectory(dtype=dtype)
        store.record(0, before, after)
        sizes.append(store.nbytes() / 10_000)
    assert 3.5 > sizes[0] > sizes[1] + 0.5 > sizes[2] + 1.4


def test_positions_of_an_outer_product_take_next_to_nothing():
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.rand(256, generator=generator) < 0.3, torch.rand(784, generator=generator) < 0.4
    before = {"w": torch.zeros(256, 784)}
    store = Trajectory()
    store.record(0, before, {"w": torch.outer(rows, columns).float()})
    moved = int(rows.sum() * columns.sum())
    assert store.nbytes() - 4 * moved < 0.02 * before["w"].numel()
    assert torch.equal(store.moved(0)["w"], torch.outer(rows, columns))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 0.0}, r"threshold must be a number above 0.*got 0.0"),
        ({"threshold": math.nan}, "threshold must be"),
        ({"min_active_steps": 1.5}, r"min_active_steps must be a share.*got 1.5"),
        ({"min_active_steps": 0}, "min_active_steps must be"),
        ({"dtype": torch.int32}, r"dtype must be one of torch.float32.*torch.int8.*got torch.int32"),
        ({"dtype": "int8"}, "dtype must be"),
    ],
)
def test_options_that_are_not_allowed(options, words):
    for make in (Trajectory, TrajectoryPlugin):
        with pytest.raises(ValueError, match=words):
            make(**options)


def test_activity_must_be_given_where_it_is_asked_for():
    before, after = states([0.0], [1.0])
    store = Trajectory(min_active_steps=0.5)
    with pytest.raises(TrajectoryError, match=r"min_active_steps=0.5 needs active="):
        store.record(0, before, after)
    assert store.tasks == ()


# On real runs ---------------------------------------------------------------------------------------------------


class Watch(SupervisedPlugin):
    """Keeps every step's weights, slowly."""

    def before_training_exp(self, strategy, **kwargs):
        self.steps = [{n: p.detach().clone() for n, p in strategy.model.named_parameters()}]

    def after_update(self, strategy, **kwargs):
        self.steps.append({n: p.detach().clone() for n, p in strategy.model.named_parameters()})

    def share(self, name):
        moved = [(a[name] != b[name]).double() for a, b in zip(self.steps[:-1], self.steps[1:], strict=True)]
        return torch.stack(moved).mean(0)


REAL = [
    {"threshold": 0.02},
    {"min_active_steps": 0.7},
    {"dtype": torch.int8},
    {"dtype": torch.float16},
    {"threshold": 0.01, "min_active_steps": 0.3, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", REAL, ids=str)
@pytest.mark.parametrize("adjustment", ["hat", "adahat"])
def test_an_economical_log_leaves_nothing_behind_and_keeps_the_claim(monkeypatch, options, adjustment):
    trained = {}
    record = Trajectory.record

    def watched(self, task, before, after, **more):
        trained.update({name: value.detach().clone() for name, value in after.items()})
        return record(self, task, before, after, **more)

    monkeypatch.setattr(Trajectory, "record", watched)
    strategy = amnesiac(trajectory=TrajectoryPlugin(**options), adjustment=adjustment, optimizer="sgd")
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
    assert trajectory(strategy).nbytes() < trajectory(lossless).nbytes()
    assert strategy.plan_unlearning([1]).claim == lossless.plan_unlearning([1]).claim
    assert strategy.plan_unlearning([2]).claim == "exact"
    for gone in ([1], [0, 2]):
        strategy.unlearn(gone)
        assert stray(strategy.model, initial) == []
    assert trajectory(strategy).nbytes() == 0


def test_a_dense_log_in_int8_takes_the_last_task_back_bit_for_bit():
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


def test_entries_that_move_in_few_steps_return():
    watch = Watch()
    plugin = TrajectoryPlugin(min_active_steps=0.8)
    strategy = amnesiac(trajectory=plugin, plugins=[watch], optimizer="sgd")
    returned = Counter()
    for experience in DIGITS.train_stream[:2]:
        strategy.train(experience)
        for name, parameter in strategy.model.named_parameters():
            if name.startswith("backbone."):
                rare = watch.share(name) < 0.8
                assert same_bits(parameter.detach(), watch.steps[0][name])[rare].all()
                moved = ~same_bits(watch.steps[-1][name], watch.steps[0][name])
                returned["rare"] += int((rare & moved).sum())
                kept = ~rare & (parameter.detach() != watch.steps[0][name])
                assert torch.equal(parameter.detach()[kept], watch.steps[-1][name][kept])
                returned["kept"] += int(kept.sum())
    assert returned["rare"] > 0
    assert returned["kept"] > 0


def test_what_an_unlearning_moves_is_no_step():
    model = torch.nn.Linear(2, 1)
    activity = StepActivity(model)
    for step in range(5):
        activity.before_step()
        with torch.no_grad():
            model.bias += float(step < 4)
        activity.after_step()
        with torch.no_grad():
            model.weight += 1.0
    assert activity.share()["bias"].tolist() == [0.8]
    assert activity.share()["weight"].tolist() == [[0.0, 0.0]]
