"""States that were changed and sealed again are loaded completely, or refused by our error without changes."""

import hashlib
import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.training.plugins import LRSchedulerPlugin
from support import examples
from support.fault_injection import places
from support.interruptions import comparable_state
from support.strategies import DIGITS, brief, learn, quiet
from torch.optim.lr_scheduler import StepLR

from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import HEAD, STATE, part_of, read_state, replace_file, seal, unseal, write_state
from avalanche_amnesia.training import load_state
from avalanche_amnesia.training.host.states import load_state_of, state_of

SEED = 35
MUTATIONS = examples(120)


built = partial(brief, evaluator=quiet)


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    strategy = learn(built(), DIGITS.train_stream[:3])
    strategy.unlearn([1])
    return strategy.save(tmp_path_factory.mktemp("hostile") / "state")


# Mutations ---------------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1.5, 1e308, "", "text", "train", [], {}, [[]], {"a": 1}, nested(40), nested(700)),
    *({"$tuple": 3}, {"$tuple": [1]}, {"$set": [[]]}, {"$float": "nan"}, {"$float": "x"}, {"$dtype": "load"}),
    *({"$bytes": "!"}, {"$device": "cuda:99"}, {"$number": ["O", 1]}, {"$number": ["V9999999999999", 9]}, {"$dict": 1}),
    *({"$tensor": ["state", "no", "cpu"]}, {"$tensor": [[], {}, 1]}, {"$generator": ["moon", 1]}, {"$eval": "1"}),
    *({"$dict": [[{"$float": "nan"}, 1]]}, {"$array": []}, {"$set": [{"$tuple": [{"$set": []}]}]}),
)
NAMES = ("train", "model", "optimizer", "__class__", "$tensor", "plugins", "_hooks", "é", "", "forward")


def mutated(body: Any, draw: random.Random) -> Any:
    """A copy with one value changed, removed, added, repeated or renamed."""
    body = deepcopy(body)
    # As many mutations in short parts as in long ones.
    paths = [*places(body)]
    depth = draw.choice(sorted({len(path) for path in paths}))
    path = draw.choice([path for path in paths if len(path) == depth])
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    kind, key = draw.choice(("value", "value", "value", "gone", "further", "name", "twice", "swapped")), path[-1]
    if kind == "value":
        holder[key] = draw.choice(VALUES)
    elif kind == "gone":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), draw.choice(VALUES) if kind == "further" else holder[key])
    elif kind == "further":
        holder[draw.choice(NAMES)] = draw.choice(VALUES)
    elif kind == "name":
        holder[draw.choice(NAMES)] = holder.pop(key)
    else:
        other = draw.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    return body


def with_other_tensors(tensors: Any, draw: random.Random) -> Any:
    """Tensors with one of another type or shape, removed, added, or full of odd numbers."""
    tensors = {group: copy(of) for group, of in tensors.items()}
    of_group = tensors[draw.choice(sorted(group for group, of in tensors.items() if of))]
    name = draw.choice(sorted(of_group))
    tensor = of_group[name]
    of_group[name] = draw.choice(
        [
            *(tensor.to(dtype) for dtype in (torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8)),
            *(tensor[:0] if tensor.dim() else tensor[None], tensor.reshape(-1), tensor.unsqueeze(0), torch.zeros(())),
            *(tensor.repeat(2) if tensor.dim() == 1 else tensor.flatten()[:1], torch.full_like(tensor, 1)),
        ]
    )
    if draw.random() < 0.3:
        del of_group[name]
    if draw.random() < 0.2:
        of_group[draw.choice(NAMES)] = torch.ones(2)
    return tensors


def broken_blob(content: bytes, draw: random.Random) -> bytes:
    """Bytes of a cut safetensors file, or of one with another header."""
    kind = draw.randrange(5)
    if kind == 0:
        return content[: draw.randrange(len(content))]
    if kind == 1:
        return struct.pack("<Q", draw.choice((0, 2**63, len(content), 10**6))) + content[8:]
    if kind == 2:
        return content + b"\0" * 9
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    if draw.random() < 0.5 and "__metadata__" in header:
        value = json.loads(header["__metadata__"]["code"])
        changed = json.dumps(mutated(value, draw)) if value else "[]"
        header["__metadata__"] = {"code": draw.choice(("[" * 9000, "", "{", '{"$part": "state"}', changed, changed))}
    elif len(header) > 1:
        name = draw.choice([key for key in header if key != "__metadata__"])
        header[name] |= draw.choice(
            ({"shape": [2**40]}, {"dtype": "F99"}, {"data_offsets": [0, 2**62]}, {"shape": [-1]})
        )
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + content[8 + size :]


def hostile(state: Path, folder: Path, number: int) -> None:
    """Write the n-th hostile state."""
    draw = random.Random(f"{SEED} {number}")
    kind = number % 6
    if kind == 4:
        body, tensors = read_state(state)
        write_state(folder, body, with_other_tensors(tensors, draw))
        return
    shutil.copytree(state, folder)
    content = unseal((state / STATE).read_bytes().decode(), **HEAD)
    if kind == 5:
        group = draw.choice(sorted(content["parts"]))
        changed = broken_blob((state / content["parts"][group]).read_bytes(), draw)
        with suppress(Exception):  # a part that can't be read keeps its name
            content["parts"][group] = part_of(changed).name
        (folder / content["parts"][group]).write_bytes(changed)
    elif number % 12 == 0:
        content = mutated(content, draw)
    else:
        content["body"] = mutated(content["body"], draw)
    (folder / STATE).write_text(seal(content, **HEAD))


def refusal(strategy: Any, folder: Path) -> str | None:
    """Message of our error if a state is refused, None if it is loaded; no other error is caught."""
    try:
        load_state(strategy, folder)
    except StateError as error:
        return str(error)
    return None


def what_it_is(strategy: Any) -> Any:
    """Model, ledger, trajectory and what else plugins know, comparable; without the mark."""
    found = comparable_state(strategy)
    found.pop("UnfinishedLoad", None)
    return found


def test_a_changed_state_is_loaded_completely_or_refused_without_changes(state, tmp_path):
    strategy = learn(built(), [DIGITS.train_stream[4]])
    strategy.save(tmp_path / "before")
    strategy = built()
    load_state(strategy, tmp_path / "before")
    before = what_it_is(strategy)
    twin, loaded = built(), 0
    for number in range(MUTATIONS):
        hostile(state, tmp_path / "hostile", number)
        if (refused := refusal(strategy, tmp_path / "hostile")) is None:
            loaded += 1
            strategy.save(tmp_path / "again")  # whole: all of it is read back
            load_state(twin, tmp_path / "again")
            strategy = built()
            load_state(strategy, tmp_path / "before")
        assert what_it_is(strategy) == before, (number, refused)
        shutil.rmtree(tmp_path / "hostile")
    assert MUTATIONS / 50 < loaded < MUTATIONS / 2


def with_body(state: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """A state like another one, but for its body, which a function changes."""
    body, tensors = read_state(state)
    change(body)
    write_state(folder, body, tensors)
    return folder


UNKNOWN = [
    *(("host", name) for name in ("train", "model", "plugins", "_listeners", "new")),
    *(("model", name) for name in ("forward", "_parameters", "heads.0.weight")),
]


@pytest.mark.parametrize(("part", "name"), UNKNOWN)
def test_a_state_sets_only_known_attributes_of_a_strategy_and_numbers_of_modules(part, name, state, tmp_path):
    def add(body):
        (body["host"] if part == "host" else body["model"]["numbers"])[name] = 1

    strategy = built()
    before, attributes = what_it_is(strategy), {**vars(strategy), "plugins": None}
    assert f"invalid value in state at {name}" in refusal(strategy, with_body(state, tmp_path / "s", add))
    assert {**vars(strategy), "plugins": None} == attributes
    assert what_it_is(strategy) == before
    assert strategy.train.__func__ is type(strategy).train


@pytest.mark.parametrize("name", ["step", "optimizer"])
def test_a_state_sets_no_method_of_a_schedule(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    plugin = LRSchedulerPlugin(StepLR(optimizer, 1))
    state = state_of(plugin)
    load_state_of(plugin, deepcopy(state), None)
    state["scheduler"][name] = 1
    with pytest.raises(StateError, match="invalid value in state"):
        load_state_of(plugin, state, None)
    assert plugin.scheduler.optimizer is optimizer


@pytest.mark.parametrize("depth", [100, 20_000])
def test_a_state_of_any_depth_is_refused(depth, state, tmp_path):
    shutil.copytree(state, tmp_path / "s")
    text = (state / STATE).read_text().replace('"body": {', '"body": {"deep": ' + "[" * depth + "]" * depth + ", ", 1)
    content = text[text.index('"content": ') + len('"content": ') : -1]
    checksum = hashlib.sha256(content.encode()).hexdigest()
    (tmp_path / "s" / STATE).write_text(re.sub('"checksum": "[0-9a-f]*"', f'"checksum": "{checksum}"', text))
    strategy = built()
    before = what_it_is(strategy)
    told = refusal(strategy, tmp_path / "s")
    assert told is None or what_it_is(strategy) == before
    assert (told is None) == (depth == 100)


@pytest.mark.parametrize("where", ["nowhere", "a file"])
def test_nothing_is_written_through_a_link(where, state, tmp_path):
    strategy, target = built(), tmp_path / "target"
    load_state(strategy, state)
    folder = strategy.save(tmp_path / "s")
    if where == "a file":
        target.write_text("years of work")
    blob = next(folder.glob("*.safetensors")).name
    (folder / blob).unlink()
    for name in (f"{STATE}.part", f"{blob}.part"):
        (folder / name).symlink_to(target)
    strategy.save(folder)
    assert target.exists() == (where == "a file")
    assert not target.exists() or target.read_text() == "years of work"
    assert not any(file.is_symlink() for file in folder.iterdir())


def test_a_link_made_during_a_write_is_not_followed(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("years of work")
    unlink = Path.unlink

    def then_link(path, *args, **kwargs):
        unlink(path, *args, **kwargs)
        monkeypatch.undo()
        path.symlink_to(target)

    monkeypatch.setattr(Path, "unlink", then_link)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "file", b"new")
    assert target.read_text() == "years of work"
