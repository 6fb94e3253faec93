"""The reader on whole, cut and damaged files."""

import struct
import zlib
from pathlib import Path

import pytest
from support.wandb_files import OfflineRunError, Recorder, read_offline_run
from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024


@pytest.fixture
def run_file(recorder: Recorder) -> Path:
    """A run of several blocks: small rows, and one record longer than a block."""
    for step in range(100):
        recorder.log("x", step / 7, step)
    recorder.logger.run.config["long"] = "y" * (3 * BLOCK)
    for step in range(100, 200):
        recorder.log("x", step / 7, step)
    recorder.read()
    (file,) = recorder.run_folder.glob("run-*.wandb")
    return file


def test_file_and_folder_say_the_same(run_file: Path) -> None:
    run = read_offline_run(run_file)
    assert run == read_offline_run(str(run_file.parent))
    assert [row["x"] for row in run.rows] == [step / 7 for step in range(200)]
    assert [row["iteration"] for row in run.rows] == list(range(200))
    assert run.config == {"long": "y" * (3 * BLOCK)}
    assert run.summary["x"] == {"min": 0, "max": 199 / 7, "last": 199 / 7}
    assert (run.name, run.project, run.complete) == ("one", "digits", True)
    assert run_file.name == f"run-{run.id}.wandb"


def test_a_cut_file_gives_what_is_whole(run_file: Path) -> None:
    data = run_file.read_bytes()
    whole = read_offline_run(run_file)
    seen = set()
    first = next(size for size in range(7, len(data)) if readable(run_file, data[:size]))
    cuts = {*range(first, len(data), 1009), *range(BLOCK - 20, BLOCK + 20), *range(len(data) - 20, len(data))}
    for size in cuts:
        run_file.write_bytes(data[:size])
        run = read_offline_run(run_file)
        assert not run.complete
        assert run.rows == whole.rows[: len(run.rows)]
        seen.add(len(run.rows))
    assert len(seen) > 20
    assert 200 in seen


def readable(file: Path, data: bytes) -> bool:
    file.write_bytes(data)
    try:
        read_offline_run(file)
    except OfflineRunError:
        return False
    return True


@pytest.mark.parametrize("place", [0.1, 0.3, 0.6, 0.99])
def test_a_flipped_bit_is_noticed(run_file: Path, place: float) -> None:
    data = bytearray(run_file.read_bytes())
    data[int(place * len(data))] ^= 1
    run_file.write_bytes(data)
    with pytest.raises(OfflineRunError, match="corrupt at byte"):
        read_offline_run(run_file)


@pytest.mark.parametrize(
    "content",
    [b"", b":W&B", b"PK\x03\x04 something else", b":W&B\xe1\xbe\x00"],
    ids=["empty", "cut", "zip", "bare"],
)
def test_files_that_are_no_run(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(content)
    with pytest.raises(OfflineRunError, match=r"run-abc\.wandb"):
        read_offline_run(file)


def test_paths_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no offline run at"):
        read_offline_run(tmp_path / "nowhere")
    with pytest.raises(OfflineRunError, match=r"holds 0 run-\*\.wandb files"):
        read_offline_run(tmp_path)


def as_log(records: list[bytes]) -> bytes:
    """The file format written down a second time, as its description says it."""
    log = b":W&B\xe1\xbe\x00"
    for record in records:
        first = True
        while first or record:
            room = BLOCK - len(log) % BLOCK
            if room < 7:
                log += bytes(room)
                continue
            part, record = record[: room - 7], record[room - 7 :]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            checked = bytes([kind]) + part
            log += struct.pack("<IH", zlib.crc32(checked), len(part)) + checked
            first = False
    return log


@pytest.mark.parametrize("left", range(16))
def test_records_at_the_edge_of_a_block(tmp_path: Path, left: int) -> None:
    head, filler, row, end = (wandb_internal_pb2.Record() for _ in range(4))
    head.run.run_id = "abc"
    item = row.history.item.add()
    item.nested_key.append("x")
    item.value_json = "1.5"
    end.exit.exit_code = 0
    used = len(as_log([head.SerializeToString()])) + 7
    filler.alert.text = "t" * (BLOCK - used - left)
    filler.alert.text = filler.alert.text[: len(filler.alert.text) - (filler.ByteSize() - len(filler.alert.text))]
    records = [record.SerializeToString() for record in (head, filler, row, end)]
    assert BLOCK - len(as_log(records[:2])) == left
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(as_log(records))
    run = read_offline_run(file)
    assert (run.rows, run.complete) == ([{"x": 1.5}], True)
