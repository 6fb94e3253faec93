"""Log files on disk always form one complete state, at every point where a run may be killed."""

import itertools
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fault_injection import FILE_OPERATIONS, at_operations
from support.strategies import DIGITS, amnesiac, learn
from support.strategy_state import fingerprint, frozen, trajectory
from support.trajectory_oracle import EVENTS, SHAPES, assert_same, contents, drawn, files, with_three_tasks

from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.log_files import TrajectoryError
from avalanche_amnesia.unlearning import applying as operation


@settings(max_examples=20, deadline=None)
@given(
    events=EVENTS,
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([None, torch.int8]),
    permanent=st.sets(st.integers(0, 9), max_size=2),
)
def test_a_trajectory_that_is_reopened_each_time_equals_one_in_memory(tmp_path_factory, events, seed, dtype, permanent):
    path = tmp_path_factory.mktemp("logs")
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    memory = Trajectory(dtype=dtype)
    for task, (kind, value) in enumerate(events):
        disk = Trajectory(path=path, dtype=dtype)
        assert contents(disk) == contents(memory)
        if kind == "learn":
            after = {name: state[name] + change for name, change in drawn(generator, value).items()}
            committed = memory.record(task, state, after)
            assert_same(disk.record(task, state, after), committed)
            state = {**after, **committed}
        elif tasks := [task for task in memory.tasks if task in value - permanent]:
            removals = [store.remove(tasks, state) for store in (memory, disk)]
            assert frozen(dict(removals[0].values)) == frozen(dict(removals[1].values))
            state = {name: removals[0].values.get(name, state[name]) for name in state}
            for store, removal in zip((memory, disk), removals, strict=True):
                store.apply(removal)
                store.settle()
        for store in (memory, disk):
            store.merge(permanent & set(memory.tasks))
        assert len(files(path)) == bool(list(path.iterdir())) + len(memory.tasks)


def test_log_files_are_mapped_into_memory(tmp_path):
    store = Trajectory(path=tmp_path)
    store.record(3, {"w": torch.zeros(1000)}, {"w": torch.ones(1000)})
    (name,) = [file for file in files(tmp_path) if file != "index.json"]
    assert name.startswith("task_3.")
    if Path("/proc/self/maps").exists():
        assert str(tmp_path / name) in Path("/proc/self/maps").read_text()


CHANGES = {
    "record": lambda store, state: store.record(9, state, {"w": state["w"] + 1}),
    "remove": lambda store, state: (store.apply(store.remove([0], state)), store.settle()),
    "merge": lambda store, state: store.merge([1, 2]),
}


def failing_at(call, behind):
    """Return a function that raises at the n-th operation, in front of it or behind it."""

    def fail(number, done):
        if number == call and done == behind:
            raise OSError("injected")

    return fail


@pytest.mark.parametrize("behind", [False, True], ids=["in front", "behind"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_killed_at_any_file_operation_leaves_a_complete_state(tmp_path, change, behind):
    """The state found afterwards is the one before the change, or the one after it."""
    expected, state = with_three_tasks(tmp_path / "to the end")
    CHANGES[change](expected, state)
    for call in itertools.count(1):
        path = tmp_path / str(call)
        store, state = with_three_tasks(path)
        before, survived = contents(store), False
        with at_operations(failing_at(call, behind)), suppress(OSError):
            CHANGES[change](store, state)
            survived = True
        # a new process opens the directory
        assert contents(Trajectory(path=path)) in (before, contents(expected))
        index = json.loads((path / "index.json").read_text())
        assert files(path) == sorted(["index.json", *(row["file"] for row in index["content"]["logs"])])
        if survived:
            break
    assert call > 5


STEPS = [
    *((Trajectory, "apply"), (Trajectory, "settle"), (TaskLedger, "forget"), (operation, "UnlearningRecord")),
    *FILE_OPERATIONS,
]


@pytest.mark.parametrize("behind", [False, True], ids=["in front", "behind"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["lossless", "coded"])
def test_a_failed_unlearning_changes_neither_files_nor_model(tmp_path, dtype, behind):
    plugin = TrajectoryPlugin(path=tmp_path, dtype=dtype)
    strategy = learn(amnesiac(trajectory=plugin, adjustment="adahat", train_epochs=1, optimizer="sgd"), DIGITS, 3)
    before, on_disk = fingerprint(strategy), contents(Trajectory(path=tmp_path))
    for call in itertools.count(1):
        with at_operations(failing_at(call, behind), STEPS), suppress(OSError):
            strategy.unlearn([0])
            break
        assert fingerprint(strategy) == before, call
        assert contents(Trajectory(path=tmp_path)) == on_disk == contents(trajectory(strategy)), call
        assert len([file for file in files(tmp_path) if file.startswith("task_0.")]) == 1
    assert call > 8
    assert [file for file in files(tmp_path) if file.startswith("task_0.")] == []
    assert contents(Trajectory(path=tmp_path)) == contents(trajectory(strategy))


def test_only_leftovers_of_a_trajectory_are_deleted(tmp_path):
    for name in ("task_5.0.safetensors", "task_5.1f.safetensors.part", "index.json.part", "task_notes.txt", "x"):
        (tmp_path / name).write_text("")
    store = Trajectory(path=tmp_path)
    assert files(tmp_path) == ["task_notes.txt", "x"]
    store.record(0, {"w": torch.zeros(2)}, {"w": torch.ones(2)})
    ours = store.logs[0].file.path.name
    assert files(tmp_path) == ["index.json", ours, "task_notes.txt", "x"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_files_keep_reports_and_merges(tmp_path, dtype):
    store, state = with_three_tasks(tmp_path, dtype=dtype)
    store.merge([1])
    again = Trajectory(path=tmp_path, dtype=dtype)
    assert contents(again) == contents(store)
    assert frozen(dict(again.remove([0], state).values)) == frozen(dict(store.remove([0], state).values))
    with pytest.raises(TrajectoryError, match=r"tasks \[1\] can't be taken out"):
        again.remove([0, 1], state)
