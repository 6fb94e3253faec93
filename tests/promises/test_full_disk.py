"""A full disk raises our error, and changes no file."""

import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.strategies import DIGITS, amnesiac, learn, quiet, trained
from support.strategy_state import bits

from avalanche_amnesia.lab.logging import JSONLogger
from avalanche_amnesia.lab.logging.run_lines import lines_of
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.training.host.saving import load_state


@pytest.fixture(params=["injected", "tmpfs"])
def small_disk(request, tmp_path, monkeypatch):
    """A directory, and calls that fill its disk and make room again; from then on every write fails, not only one."""
    path = tmp_path / "disk"
    path.mkdir()
    if request.param == "injected":
        full = [False]
        original = Path.write_bytes

        def fails(*args, **kwargs):
            if full[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        monkeypatch.setattr(Path, "write_bytes", fails)
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
