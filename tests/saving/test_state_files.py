"""Files of a state: written completely or not at all, and refused if they are damaged."""

import itertools
import json
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fault_injection import at_operations
from support.forked import forked
from torch import Tensor, nn

from avalanche_amnesia.saving import StateError, checked, files
from avalanche_amnesia.saving.encoding import OwnFile, decode, encode
from avalanche_amnesia.saving.files import Part, read_state, write_state
from avalanche_amnesia.saving.values import create

PARTS = {
    "state": Part({"w": torch.arange(6.0), "b": torch.tensor([True, False])}),
    "log1": Part({"v": torch.ones(2, 2)}, '{"v": 1}'),
}


def same_parts(one, two) -> bool:
    return one.keys() == two.keys() and all(
        one[place].code == two[place].code
        and one[place].keys() == two[place].keys()
        and all(torch.equal(one[place][n], two[place][n]) for n in one[place])
        for place in one
    )


def write_often(path, number):
    own, log = {"w": torch.full((300 * number,), float(number))}, {"v": torch.ones(number)}
    for _ in range(60):
        body = {"n": number, "padding": "x" * 1000 * number}
        write_state(path, body, {"state": Part(own), f"log{number}": Part(log)})


@pytest.mark.skipif(os.name == "nt", reason="no locks of directories there")
def test_concurrent_writers_never_mix_their_states(tmp_path):
    path = tmp_path / "s"
    write_often(path, 1)
    writers, seen = [forked(write_often, path, number) for number in (1, 2)], 0
    while any(writer.is_alive() for writer in writers):
        body, tensors = read_state(path)
        assert tensors.keys() == {"state", f"log{body['n']}"}
        assert torch.equal(tensors["state"]["w"], torch.full((300 * body["n"],), float(body["n"])))
        seen += 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen > 1
    assert len(list(path.iterdir())) == 3


def test_a_write_interrupted_at_any_operation_leaves_the_old_state_or_the_new_one(tmp_path):
    new = {"state": Part({"w": torch.zeros(3)}), "log1": PARTS["log1"], "log2": Part({"v": torch.rand(3)}, "{}")}

    def interrupt(number, done):
        if number == failing and not done:
            raise KeyboardInterrupt

    for failing in itertools.count(1):
        folder = tmp_path / str(failing)
        write_state(folder, {"a": 1}, PARTS)
        interrupted = True
        with at_operations(interrupt), suppress(KeyboardInterrupt):
            write_state(folder, {"a": 2}, new)
            interrupted = False
        body, tensors = read_state(folder)
        assert body["a"] in (1, 2) if interrupted else body["a"] == 2
        assert same_parts(tensors, PARTS if body["a"] == 1 else new)
        write_state(folder, {"a": 3}, new)  # leftovers of the interruption do not matter, and are removed
        assert same_parts(read_state(folder)[1], new)
        assert len(list(folder.iterdir())) == 4
        if not interrupted:
            break
    assert failing > 10


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StateError, match=r"thesis\.tex.* no part of a state"):
        write_state(tmp_path, {}, PARTS)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StateError, match="is a file"):
        write_state(tmp_path / "thesis.tex", {}, PARTS)


def edit(name, change):
    """Return a function that changes the bytes of a file in a state's folder."""

    def apply(folder):
        file = next(folder.glob(name))
        file.write_bytes(change(file.read_bytes()))

    return apply


STATE, BLOB = "state.json", "*.safetensors"
DAMAGES = [
    (lambda folder: (folder / STATE).unlink(), "state.json is missing"),
    (edit(STATE, lambda content: content[:-20]), "cut short"),
    (edit(STATE, lambda content: content.replace(b'"a": 1', b'"a": 2')), "checksum does not fit"),
    (edit(STATE, lambda content: b'{"epoch": 3}'), "something else wrote it"),
    (edit(STATE, lambda content: b"[1, 2]"), "something else wrote it"),
    (edit(STATE, lambda content: json.dumps({**json.loads(content), "version": 3}).encode()), "version 3, and .* 4"),
    (edit(BLOB, lambda content: content[:-1]), "is damaged"),
    (edit(BLOB, lambda content: content[:-1] + b"\7"), "is damaged"),
    (lambda folder: next(folder.glob(BLOB)).unlink(), "lacks a part"),
]


def test_damaged_files_are_refused_with_the_kind_of_damage(tmp_path):
    for number, (damage, words) in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        write_state(folder, {"a": 1}, PARTS)
        damage(folder)
        with pytest.raises(StateError, match=words):
            read_state(folder)


class Foreign:
    """An object that no state can hold."""


def through(value):
    """A value, encoded, written as JSON, and decoded."""
    code, tensors = encode(value)
    return decode(json.loads(json.dumps(code, allow_nan=False)), tensors)


def test_values_come_back_with_their_types():
    for value in (
        *(None, True, 3, 0.1, -0.0, float("inf"), "text", b"\0\xff", (1, [2, (3,)]), {1, 2}, frozenset({(1, 2)})),
        *({1: "a", (2, "b"): [None]}, {"a": {}, "b": [()]}, {"$tuple": [1]}, {"1": 1, 1: 2}),
        *(torch.float16, torch.device("cpu"), np.float32(0.1), np.int64(7)),
    ):
        found = through(value)
        assert repr(found) == repr(value) or found == value
        assert type(found) is type(value)


def test_nan_tensors_arrays_and_generators_come_back():
    assert isnan(through(float("nan")))
    assert np.array_equal(through(np.eye(3)), np.eye(3))
    assert through(np.array(2.5)).shape == ()
    assert isnan(through(np.float32("nan")))
    tensor = torch.tensor([1.0, float("nan")])
    assert torch.equal(through({"a": (tensor,)})["a"][0].view(torch.int32), tensor.view(torch.int32))
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    assert torch.equal(torch.rand(2, generator=through(generator)), torch.rand(2, generator=generator))


def test_objects_of_other_types_are_refused_with_their_place():
    others = (Foreign(), Foreign, max, nn.Linear(1, 1), nn.Parameter(torch.ones(1)), deque([1]))
    for thing in (*others, np.longdouble(1), np.ones(2, np.longdouble)):
        with pytest.raises(StateError, match=r"a\.b\[0\] is a "):
            encode({"a": {"b": [thing]}})


def test_the_part_of_an_apart_value_does_not_depend_on_its_place():
    log, other = {"x": torch.ones(2), "n": 3}, torch.zeros(2)
    parts = [encode(value)[1] for value in ({"logs": {3: OwnFile(log)}, "o": other}, {"more": [OwnFile(log)]})]
    (one,), (two,) = ([part for place, part in found.items() if place != "state"] for found in parts)
    assert (one.name, list(one), one.code) == (two.name, list(two), two.code)
    found = through({"logs": {3: OwnFile(log)}})["logs"][3]
    assert (found["x"].tolist(), found["n"]) == ([1, 1], 3)


def test_faults_in_an_apart_value_are_named_with_their_place():
    with pytest.raises(StateError, match=r"a\[0\]\.b is a Foreign"):
        encode({"a": [OwnFile({"b": Foreign()})]})
    with pytest.raises(StateError, match=r"a\.b lies apart in a part"):
        encode({"a": OwnFile({"b": OwnFile(1)})})


def test_unchanged_parts_are_written_again_only_if_they_are_damaged(tmp_path, monkeypatch):
    folder, written = tmp_path / "s", []
    original = Path.write_bytes

    def noted(path, content):
        written.append(path.name.removesuffix(".part"))
        return original(path, content)

    monkeypatch.setattr(Path, "write_bytes", noted)
    for _ in range(2):
        write_state(folder, {}, PARTS)
        assert [name == "state.json" for name in written] == ([False, False, True] if _ == 0 else [True])
        written.clear()
    for harm in (lambda blob: original(blob, b"cut"), lambda blob: (blob.unlink(), blob.symlink_to(tmp_path / "x"))):
        blob = next(folder.glob("*.safetensors"))
        harm(blob)
        write_state(folder, {}, PARTS)
        assert written == [blob.name, "state.json"]
        written.clear()
        assert same_parts(read_state(folder)[1], PARTS)
    changed = {**PARTS, "log1": Part({"v": PARTS["log1"]["v"]}, '{"v": 2}')}  # only its JSON
    write_state(folder, {}, changed)
    assert len(written) == 2
    assert same_parts(read_state(folder)[1], changed)


def test_only_one_part_at_a_time_is_in_memory_and_tensors_may_share_theirs(tmp_path, monkeypatch):
    shared, made, original = torch.arange(6.0), [], files.part_bytes

    def noted(part):
        full = [file for file in tmp_path.glob("*.part") if file.stat().st_size]
        assert len(full) == len(made)  # all earlier ones are on the disk
        made.append(part)
        return original(part)

    monkeypatch.setattr(files, "part_bytes", noted)
    parts = {**PARTS, "tied": Part({"whole": shared, "again": shared, "row": shared[:2], "T": shared.view(2, 3).T})}
    write_state(tmp_path, {}, parts)
    assert len(made) == 3
    assert same_parts(read_state(tmp_path)[1], parts)


def test_invalid_codes_are_refused_with_their_place_and_never_call_a_name():
    for code in (
        *({"$eval": "1"}, {"$dtype": "load"}, {"$dtype": "float7"}, {"$bytes": 3}, {"$tuple": 3}, {"$dict": [[1]]}),
        *({"$tensor": ["w", "cpu"]}, {"$part": "log1"}, {"$joined": [[1]]}, {"$device": "moon"}),
        *({"$dict": [[[], 1]]}, {"$generator": ["cpu"]}),
    ):
        with pytest.raises(StateError, match=r"invalid value in state at plugins\[1\]\.heads"):
            decode({"plugins": [1, {"heads": code}]}, {})


@dataclass(frozen=True)
class Point:
    x: int
    place: Tensor | None
    names: frozenset[str]


def test_fields_of_a_loaded_object_are_checked_by_name_and_type():
    point = Point(1, None, frozenset("a"))
    assert create(Point, dict(vars(point))) == point
    for changed, place in (({"x": "1"}, "at x"), ({"names": {"a"}}, "at names"), ({"y": 1}, "where .'x'")):
        with pytest.raises(StateError, match=f"invalid value in state.* {place}" if "at" not in place else place):
            create(Point, {**vars(point), **changed})
    assert checked({"b": 1, "a": None}, a=list | None, b=int) == [None, 1]
    with pytest.raises(StateError, match="invalid value in state"):
        checked([1, 2], a=int)
