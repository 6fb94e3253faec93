"""Files of a state: whole or not at all, and refused by name where they are not what they should be."""

import json
import os
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from avalanche_amnesia.saving import StateError, saveable
from avalanche_amnesia.saving.encoding import Decoder, Encoder, attributes_of
from avalanche_amnesia.saving.files import read_state, write_state

TENSORS = {"state": {"w": torch.arange(6.0), "b": torch.tensor([True, False])}, "log1": {"v": torch.ones(2, 2)}}


def same(one, two) -> bool:
    return one.keys() == two.keys() and all(
        one[group].keys() == two[group].keys() and all(torch.equal(one[group][n], two[group][n]) for n in one[group])
        for group in one
    )


def test_what_is_written_is_read(tmp_path):
    write_state(tmp_path / "s", {"a": [1, 0.1, None]}, TENSORS)
    body, tensors = read_state(tmp_path / "s")
    assert body == {"a": [1, 0.1, None]}
    assert same(tensors, TENSORS)


@pytest.mark.parametrize("failing", range(12))
def test_interrupted_at_any_operation_it_is_the_old_state_or_the_new_one(failing, tmp_path, monkeypatch):
    write_state(tmp_path / "s", {"a": 1}, TENSORS)
    new = {"state": {"w": torch.zeros(3)}, "log1": TENSORS["log1"], "log2": {"v": torch.rand(3)}}
    done = [0]

    def counted(original):
        def call(*args, **kwargs):
            done[0] += 1
            if done[0] == failing + 1:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    interrupted = False
    try:
        write_state(tmp_path / "s", {"a": 2}, new)
    except KeyboardInterrupt:
        interrupted = True
    monkeypatch.undo()
    assert interrupted == (done[0] > failing)
    body, tensors = read_state(tmp_path / "s")
    assert body["a"] in (1, 2) if interrupted else body["a"] == 2
    assert same(tensors, TENSORS if body["a"] == 1 else new)
    write_state(tmp_path / "s", {"a": 3}, new)  # whatever was left is in nobody's way, and goes
    assert same(read_state(tmp_path / "s")[1], new)
    assert len(list((tmp_path / "s").iterdir())) == 4


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StateError, match=r"thesis\.tex.* no part of a state"):
        write_state(tmp_path, {}, TENSORS)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StateError, match="is a file"):
        write_state(tmp_path / "thesis.tex", {}, TENSORS)


def damaged(kind: str, folder: Path) -> None:
    state = folder / "state.json"
    blob = next(folder.glob("*.safetensors"))
    content = json.loads(state.read_text())
    if kind == "no state":
        state.unlink()
    elif kind == "truncated":
        state.write_bytes(state.read_bytes()[:-20])
    elif kind == "changed":
        state.write_text(state.read_text().replace('"a": 1', '"a": 2'))
    elif kind == "foreign":
        state.write_text('{"epoch": 3}')
    elif kind == "a list":
        state.write_text("[1, 2]")
    elif kind == "older":
        state.write_text(json.dumps({**content, "version": 0}))
    elif kind == "tensors cut":
        blob.write_bytes(blob.read_bytes()[:-1])
    elif kind == "tensors changed":
        blob.write_bytes(blob.read_bytes()[:-1] + b"\7")
    else:
        blob.unlink()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("no state", "state.json is missing"),
        ("truncated", "cut short"),
        ("changed", "checksum does not fit"),
        ("foreign", "something else wrote it"),
        ("a list", "something else wrote it"),
        ("older", "version 0, and this package reads version 1"),
        ("tensors cut", "is damaged"),
        ("tensors changed", "is damaged"),
        ("tensors gone", "lacks a part"),
    ],
)
def test_what_is_no_state_is_refused(kind, told, tmp_path):
    write_state(tmp_path / "s", {"a": 1}, TENSORS)
    damaged(kind, tmp_path / "s")
    with pytest.raises(StateError, match=told):
        read_state(tmp_path / "s")


# Values ------------------------------------------------------------------------------------------------------------


@saveable
class Point:
    """A class whose objects may be made."""

    def __init__(self, x):
        raise AssertionError("loading runs no code")


class Foreign:
    """A class whose objects may not."""

    def __init__(self):
        self.x = 1


def point(x):
    made = object.__new__(Point)
    made.x = x
    return made


def through(value, there=None, known=()):
    """A value, encoded, written as JSON, and decoded."""
    encoder = Encoder(dict(known))
    code = json.loads(json.dumps(encoder.encode(value, "value"), allow_nan=False))
    return Decoder(encoder.tensors, dict(known)).decode(code, there, "value")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.1, -0.0, float("inf"), "text", b"\0\xff", (1, [2, (3,)]), {1, 2}, frozenset({(1, 2)})),
        *({1: "a", (2, "b"): [None]}, OrderedDict([("b", 1), ("a", 2)]), deque([1, 2])),
        *(torch.float16, torch.device("cpu"), torch.Size([2, 3]), Path("a/b"), np.float32(0.1), np.int64(7)),
    ],
    ids=repr,
)
def test_values_come_back(value):
    found = through(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_arrays_and_generators_come_back():
    assert np.isnan(through(float("nan")))
    assert np.array_equal(through(np.eye(3)), np.eye(3))
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    assert torch.equal(torch.rand(2, generator=through(generator)), torch.rand(2, generator=generator))


def test_one_object_at_two_places_stays_one():
    shared, tensor = point(1), torch.ones(2)
    found = through([shared, shared, point(1), tensor, {"t": tensor}])
    assert found[0] is found[1]
    assert found[0] is not found[2]
    assert found[3] is found[4]["t"]


def test_objects_that_are_there_are_filled_in_place():
    here, aliased = Foreign(), [1]
    here.items, here.x = aliased, 1
    saved = Foreign()
    saved.items, saved.x = [1, 2, 3], 9
    assert through(saved, here) is here
    assert (here.x, here.items) == (9, [1, 2, 3])
    assert here.items is aliased


def test_only_saveable_classes_are_made():
    with pytest.raises(StateError, match="Foreign, and is missing here"):
        through(Foreign())


def test_functions_and_classes_are_the_script_s_own():
    assert through({"f": max}, {"f": max}) == {"f": max}
    with pytest.raises(StateError, match="which a script gives"):
        through({"f": max}, {"f": min})


def test_known_objects_are_referred_to():
    model = nn.Linear(2, 2)
    assert through([model], None, {"model": model})[0] is model


class Guarded:
    not_saved = frozenset({"where"})

    def __init__(self):
        self.where, self.x = "here", 1


class Pickled(Guarded):
    def __getstate__(self):
        return dict(self.__dict__)


def test_what_is_not_saved_can_t_be_set_by_a_file_either():
    assert attributes_of(Guarded()) == attributes_of(Pickled()) == {"x": 1}
    there = Guarded()
    assert through(Guarded(), there) is there
    name = f"{Guarded.__module__}.{Guarded.__qualname__}"
    for attribute in ("where", "__class__", "__dict__"):
        with pytest.raises(StateError, match="may set"):
            Decoder({}, {}).decode({"object": 0, "class": name, "attributes": {attribute: "there"}}, there, "value")
    assert vars(there) == {"where": "here", "x": 1}


def test_a_name_that_a_file_gives_is_never_called():
    for code in ({"object": 0, "class": "os.system", "attributes": {}}, {"given": "builtins.exec"}, {"eval": "1"}, {}):
        with pytest.raises(StateError):
            Decoder({}, {}).decode(code, None, "value")
