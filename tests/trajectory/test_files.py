"""Log files on disk form one complete state wherever a run is killed, and only the saved strategy continues in them."""

import copy
import itertools
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fault_injection import FILE_OPERATIONS, at_operations, raiser
from support.forked import forked
from support.strategies import DIGITS, amnesiac, learn, trained
from support.strategy_state import bits, fingerprint, frozen, trajectory
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


def saved(thing, path):
    torch.save(thing, path)
    return path


def loaded(path):
    return torch.load(path, weights_only=False)


def strategy_with(path, tasks=()):
    return trained(tasks, train_epochs=1, trajectory=TrajectoryPlugin(path=path))


def one_state(path, store):
    """Return True if the directory holds exactly the logs of this trajectory, all mapped."""
    assert contents(Trajectory(path=path)) == contents(store)
    assert all(log.file is not None and log.file.path.parent == path for log in store.logs.values())
    return files(path) == sorted(["index.json", *(log.file.path.name for log in store.logs.values())])


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.mark.parametrize("since", ["trained", "unlearned", "deleted", "damaged"])
def test_a_checkpoint_continues_although_its_directory_changed(tmp_path, logs, since):
    first = strategy_with(logs, [0, 1])
    file = saved(first, tmp_path / "strategy.pt")
    if since == "trained":
        learn(first, DIGITS.train_stream[2:4])
    elif since == "unlearned":
        first.unlearn([0])
    elif since == "deleted":
        shutil.rmtree(logs)
    else:
        path = next(logs.glob("task_0.*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    again, plain = loaded(file), strategy_with(None, [0, 1])
    trajectory(again).settle()  # it deletes nothing before its first change
    assert contents(trajectory(again)) == contents(trajectory(plain))
    for strategy in (again, plain):
        strategy.train(DIGITS.train_stream[2])
    assert one_state(logs, trajectory(again))
    assert again.unlearn([1]).changes == plain.unlearn([1]).changes
    assert bits(again.model) == bits(plain.model)
    assert contents(trajectory(again)) == contents(trajectory(plain))
    assert one_state(logs, trajectory(again))


def test_loading_changes_no_file_and_the_first_strategy_may_continue(tmp_path, logs):
    first = strategy_with(logs, [0])
    file = saved(first, tmp_path / "strategy.pt")
    first.train(DIGITS.train_stream[1])
    before = files(logs)
    again = loaded(file)
    trajectory(again).settle()  # it deletes no file of another owner
    assert files(logs) == before
    first.train(DIGITS.train_stream[2])
    assert one_state(logs, trajectory(first))


def test_the_last_writer_owns_the_directory(tmp_path, logs):
    first = strategy_with(logs, [0])
    file = saved(first, tmp_path / "strategy.pt")
    one, two = loaded(file), loaded(file)
    one.train(DIGITS.train_stream[1])
    two.train(DIGITS.train_stream[2])
    for refused in (first, one):
        before = bits(refused.model), contents(trajectory(refused))
        refused.forward = raiser(AssertionError)  # the refusal comes before the training
        with pytest.raises(TrajectoryError, match=r"changed by another trajectory.*directory of its own"):
            refused.train(DIGITS.train_stream[3])
        assert (bits(refused.model), contents(trajectory(refused))) == before
        del refused.forward
        refused.abort_training()
        with pytest.raises(TrajectoryError, match="changed by another trajectory"):
            refused.unlearn([0])
        assert (bits(refused.model), contents(trajectory(refused))) == before
        trajectory(refused).settle()  # it deletes no file of another owner
    assert one_state(logs, trajectory(two))
    assert two.unlearn([0]).plan.tasks == (0,)
    back = loaded(saved(one, tmp_path / "one.pt"))  # saving and loading lets the strategy own the directory again
    back.train(DIGITS.train_stream[3])
    assert one_state(logs, trajectory(back))
    assert trajectory(back).tasks == (0, 1, 3)


def test_a_directory_in_which_another_run_started_is_refused(tmp_path, logs):
    file = saved(strategy_with(logs, [0]), tmp_path / "strategy.pt")
    shutil.rmtree(logs)
    other = strategy_with(logs, [3])
    again = loaded(file)
    before = bits(again.model)
    with pytest.raises(TrajectoryError, match=r"another trajectory, which began again there; move it away"):
        again.train(DIGITS.train_stream[1])
    assert bits(again.model) == before
    assert one_state(logs, trajectory(other))
    logs.rename(tmp_path / "of the other one")
    again.train(DIGITS.train_stream[1])
    assert one_state(logs, trajectory(again))


def test_a_directory_that_was_moved_during_a_run_is_an_error(tmp_path, logs):
    first = strategy_with(logs, [0])
    logs.rename(tmp_path / "elsewhere")
    with pytest.raises(TrajectoryError, match="changed by another trajectory, or moved away"):
        first.train(DIGITS.train_stream[1])
    assert contents(Trajectory(path=tmp_path / "elsewhere")) == contents(trajectory(first))


def test_a_copy_keeps_its_logs_in_memory_and_changes_no_file(logs):
    first = strategy_with(logs, [0, 1])
    twin = copy.deepcopy(first)
    before = files(logs)
    twin.unlearn([0])
    twin.train(DIGITS.train_stream[2])
    assert files(logs) == before
    first.unlearn([0])
    first.train(DIGITS.train_stream[2])
    assert bits(first.model) == bits(twin.model)
    assert contents(trajectory(first)) == contents(trajectory(twin))
    assert all(log.file is None for log in trajectory(twin).logs.values())
    assert one_state(logs, trajectory(first))


def test_equal_logs_have_the_same_file_name_and_are_written_once(tmp_path, logs, monkeypatch):
    store, state = with_three_tasks(logs)
    before = {file: file.stat().st_mtime_ns for file in logs.iterdir()}
    store.restore(store.logs)
    Trajectory(path=logs).restore(store.logs)
    assert {file: file.stat().st_mtime_ns for file in logs.iterdir()} == before
    store.apply(store.remove([2], state))
    with_three_tasks(tmp_path / "twin")
    names = set(files(tmp_path / "twin"))
    assert {file.name for file in before} == names


def test_logs_mapped_from_another_directory_are_copied(tmp_path, logs):
    store = Trajectory(path=logs)
    store.restore(with_three_tasks(tmp_path / "elsewhere")[0].logs)
    assert one_state(logs, store)


def records(path, number):
    """Open new directories, and record when both processes have opened them."""
    for trial in range(4):
        store, state = Trajectory(path=path / str(trial)), torch.zeros(3)
        (path / f"open.{trial}.{number}").touch()
        while len(list(path.glob(f"open.{trial}.*"))) < 2:
            pass
        try:
            for task in range(3):
                store.record(task, {"w": state}, {"w": state + number})
                state = state + number
        except Exception as error:  # the other process waits for this one
            (path / f"refused.{trial}.{number}").write_text(str(error))


def test_one_of_two_processes_in_one_directory_is_refused(tmp_path):
    processes = [forked(records, tmp_path, number) for number in (1, 2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for trial in range(4):
        (refused,) = tmp_path.glob(f"refused.{trial}.*")
        assert "was changed by another trajectory" in refused.read_text()
        store = Trajectory(path=tmp_path / str(trial))
        assert store.tasks == (0, 1, 2)
        number = 3 - int(refused.suffix[1:])
        assert store.values_before(2, {"w": torch.full((3,), 3.0 * number)})["w"].tolist() == [2.0 * number] * 3
