"""Damaged, foreign or unwritable log files raise our error, and nothing has changed."""

import errno
import os
import random
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from support.fault_injection import at_operations
from support.strategies import DIGITS, amnesiac, learn, quiet, trained
from support.strategy_state import bits, fingerprint, trajectory
from support.trajectory_oracle import contents, files, with_three_tasks

from avalanche_amnesia import TrajectoryPlugin
from avalanche_amnesia.lab.logging import JSONLogger
from avalanche_amnesia.lab.logging.run_lines import lines_of
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.training.host.saving import load_state
from avalanche_amnesia.trajectory import Trajectory, log_files
from avalanche_amnesia.trajectory.log_files import TrajectoryError
from avalanche_amnesia.trajectory.undo_log import LogFile


def flip(path, bit):
    """Flip a bit of a file in its place, as a disk does."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def log_file(path, task=1):
    (found,) = path.glob(f"task_{task}.*")
    return found


DAMAGES = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(5000)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "other tensors": lambda path: save_file({"w": torch.zeros(3)}, path),
    "other metadata": lambda path: save_file({"w": torch.zeros(3)}, path, metadata={"trajectory": "[1]"}),
    "json": lambda path: path.write_text('{"logs": []}'),
    "a list": lambda path: path.write_text("[1, 2]"),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["index", "log"])
def test_a_directory_with_a_damaged_file_is_refused_and_left_as_it_is(tmp_path, which, damage):
    with_three_tasks(tmp_path)
    path = tmp_path / "index.json" if which == "index" else log_file(tmp_path)
    DAMAGES[damage](path)
    before = files(tmp_path)
    if (which, damage) == ("index", "missing"):
        return  # a directory without an index is an empty one
    with pytest.raises(TrajectoryError, match=r"no trajectory that can be continued.*empty directory") as caught:
        Trajectory(path=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert which == "index" or path.name in str(caught.value)
    assert files(tmp_path) == before


def test_a_flipped_bit_anywhere_is_found_when_files_are_opened(tmp_path):
    store, _ = with_three_tasks(tmp_path, dtype=torch.int8)
    store.merge([1])
    generator = random.Random(0)
    for path in sorted(tmp_path.iterdir()):
        n = 8 * path.stat().st_size
        for bit in sorted(generator.sample(range(n), min(n, 150))):
            flip(path, bit)
            with pytest.raises(TrajectoryError):
                Trajectory(path=tmp_path)
            flip(path, bit)
    assert contents(Trajectory(path=tmp_path)) == contents(store)


USES = {
    "remove": lambda store, state: store.remove([0], state),
    "values_before": lambda store, state: store.values_before(0, state),
    "moved": lambda store, state: store.moved(1),
    "moved_with": lambda store, state: store.moved_with([1]),
    "merge": lambda store, state: store.merge([0]),
    "report": lambda store, state: store.report(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_damage_to_an_opened_file_is_found_before_it_is_used(tmp_path, damage, use):
    store, state = with_three_tasks(tmp_path)
    path = log_file(tmp_path)
    before = list(store.logs.values())
    if damage == "bit":
        flip(path, 8 * path.read_bytes().index(store.logs[1]["w"].low.numpy().tobytes()) + 3)
    else:
        DAMAGES[damage](path)
    with pytest.raises(TrajectoryError, match=r"was changed after it had been written.*last saved strategy"):
        USES[use](store, state)
    assert list(store.logs.values()) == before


def test_an_unlearning_with_a_damaged_log_is_refused_before_anything_changes(tmp_path):
    strategy = trained(3, train_epochs=1, trajectory=TrajectoryPlugin(path=tmp_path))
    path = log_file(tmp_path, 2)
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")  # after the header, which is read once
    for bit in (8 * start, 8 * (path.stat().st_size - 1)):
        before = fingerprint(strategy), files(tmp_path)
        flip(path, bit)
        with pytest.raises(TrajectoryError, match=path.name):
            strategy.unlearn([1])
        with pytest.raises(TrajectoryError, match=path.name):
            strategy.save(tmp_path / "state")  # where the damage would get a fitting checksum
        flip(path, bit)
        assert (fingerprint(strategy), files(tmp_path)) == before
    assert strategy.unlearn([1]).plan.tasks == (1,)


def test_an_earlier_log_that_a_removal_does_not_read_may_be_damaged(tmp_path):
    store, state = with_three_tasks(tmp_path)
    expected = with_three_tasks(None)[0].remove([2], state).values["w"]
    flip(log_file(tmp_path, 0), 8 * (log_file(tmp_path, 0).stat().st_size - 1))
    assert torch.equal(store.remove([2], state).values["w"], expected)
    with pytest.raises(TrajectoryError, match="the log of task 0 is damaged"):
        store.remove([0], state)


def test_a_file_of_another_name_is_refused(tmp_path):
    with_three_tasks(tmp_path)
    shutil.copyfile(log_file(tmp_path, 0), log_file(tmp_path, 1))
    with pytest.raises(TrajectoryError, match="another log than its name says"):
        Trajectory(path=tmp_path)


def test_a_log_s_file_may_be_replaced_while_it_is_mapped(tmp_path):
    """Its name then belongs to another file, of another size."""
    store, state = with_three_tasks(tmp_path)
    expected = with_three_tasks(None)[0].remove([0], state).values["w"]
    path = log_file(tmp_path, 0)
    (tmp_path / "other").write_bytes(path.read_bytes() + b"0")
    os.replace(tmp_path / "other", path)
    assert torch.equal(store.remove([0], state).values["w"], expected)
    assert isinstance(store.logs[0].file, LogFile)


def test_a_path_that_is_no_directory_or_may_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TrajectoryError, match=r"no trajectory.*empty directory that can be written to"):
            TrajectoryPlugin(path=path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(TrajectoryError, match="may not be read and written to"):
        TrajectoryPlugin(path=tmp_path / "locked")


# A full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["injected", "tmpfs"])
def small_disk(request, tmp_path, monkeypatch):
    """A directory, and calls that fill its disk and make room again; from then on every write fails, not only one."""
    path = tmp_path / "disk"
    path.mkdir()
    if request.param == "injected":
        full = [False]
        said = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        for owner, name, error in (
            (log_files, "save_file", said),
            (Path, "write_bytes", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        ):
            original = getattr(owner, name)

            def fails(*args, original=original, error=error, **kwargs):
                if full[0]:
                    raise error
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, fails)
        yield path, lambda: full.__setitem__(0, True), lambda: full.__setitem__(0, False)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")

    def fill():
        with open(path / "filler", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))

    yield path, fill, lambda: (path / "filler").unlink()
    subprocess.run(["umount", "-l", path], check=True)


def test_a_task_that_fills_the_disk_is_undone_and_can_be_trained_later(small_disk):
    disk, fill, make_room = small_disk
    path = disk / "logs"
    strategy = trained(2, train_epochs=1, trajectory=TrajectoryPlugin(path=path))
    before = bits(strategy.model), contents(trajectory(strategy)), files(path)
    fill()
    for change in (lambda: strategy.train(DIGITS.train_stream[2]), lambda: strategy.unlearn([0])):
        with pytest.raises(OSError, match=r"logs can't be written .*No space left.*Make room"):
            change()
        strategy.abort_training()
        assert (bits(strategy.model), contents(trajectory(strategy)), files(path)) == before
    assert [file for file in files(disk) if file != "filler"] == ["logs"]
    make_room()
    strategy.train(DIGITS.train_stream[2])
    strategy.unlearn([0])
    assert contents(Trajectory(path=path)) == contents(trajectory(strategy))
    plain = trained(3, train_epochs=1)
    plain.unlearn([0])
    assert bits(strategy.model) == bits(plain.model)


def test_a_full_disk_changes_no_saved_state_record_log_or_store(small_disk):
    disk, fill, make_room = small_disk
    log = JSONLogger(disk / "log", pictures=False)
    strategy = trained(1, train_epochs=1, evaluator=quiet())
    saved = bits(strategy.model)
    strategy.save(disk / "state")
    strategy.train(DIGITS.train_stream[1])
    run = learn(RunStore(disk / "store").run(amnesiac(train_epochs=1)), DIGITS.train_stream[:1])
    record = strategy.unlearn([0])
    now = bits(strategy.model)
    fill()
    for change in (
        lambda: strategy.save(disk / "state"),
        lambda: strategy.save(disk / "new"),
        lambda: record.save(disk / "record.json"),
        lambda: JSONLogger(disk / "other"),
        lambda: run.train(DIGITS.train_stream[1]),
        lambda: [*(log._writer.note({"a": 300 * "b"}) for _ in range(100)), log._writer.keep(record)],
    ):
        with pytest.raises(OSError, match=rf"^{disk}/\w+.* can't be written \(.*No space left.*Make room") as caught:
            change()
        assert str(caught.value).count("can't be written") == 1
    assert bits(strategy.model) == now
    assert run.trained == (0,)
    loaded = amnesiac(train_epochs=1, evaluator=quiet())
    load_state(loaded, disk / "state")
    assert bits(loaded.model) == saved
    assert not [path for path in disk.rglob("*") if path.name.endswith(".part") or path.name == "record.json"]
    make_room()
    strategy.save(disk / "state")
    load_state(loaded, disk / "state")
    assert bits(loaded.model) == now
    record.save(disk / "record.json")
    log.finish()
    assert [line["kind"] for line in lines_of(disk / "log")][-1] == "end"
    run.train(DIGITS.train_stream[1])
    plain = amnesiac(train_epochs=1)
    plain.train(DIGITS.train_stream[:2])
    assert bits(run.strategy.model) == bits(plain.model)


@pytest.mark.parametrize("behind", [False, True], ids=["in front", "behind"])
@pytest.mark.parametrize("change", ["remove", "merge"])
def test_memory_and_directory_agree_after_a_disk_fails_for_good(tmp_path, change, behind):
    """Not one call fails but all that follow as well: going back must need no disk."""
    calls = 0

    def fail(number, done):
        nonlocal calls
        calls = number
        if number > last or (number == last and done == behind):
            raise OSError(errno.EIO, "injected")

    for last in range(1, 20):
        path = tmp_path / str(last)
        store, state = with_three_tasks(path)
        logs, before, after = store.logs, contents(store), None
        with at_operations(fail):
            with suppress(OSError):
                if change == "merge":
                    store.merge([1, 2])
                    after = contents(store)
                else:
                    store.apply(store.remove([0], state))
            if change == "remove":
                with suppress(OSError):
                    store.restore(logs)
        assert contents(store) == (before if after is None else after)
        store.record(9, state, {"w": state["w"] + 1})
        assert contents(Trajectory(path=path)) == contents(store)
        assert len(files(path)) == 5
    assert calls < last  # the last round met no failure
