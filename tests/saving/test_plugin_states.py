"""State of user plugins: saved from attributes, by ``state()`` or a conversion, or refused; states that are signed."""

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from avalanche.core import SupervisedPlugin
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load, save
from support.interruptions import comparable_state
from support.strategies import DIGITS, amnesiac, learn, quiet
from support.strategy_state import bits, unchanged
from torch import nn

from avalanche_amnesia.audit.signing import SigningError
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import HEAD, STATE, part_of, seal
from avalanche_amnesia.training import load_state, save_state
from avalanche_amnesia.training.host.states import Conversion, load_state_of, register_state, state_of


class Counting(SupervisedPlugin):
    """Plain values of its own, and settings."""

    def __init__(self, rate: float = 0.5, schedule: Any = max) -> None:
        super().__init__()
        self.rate, self.schedule = rate, schedule
        self.steps, self.seen, self.mean = 0, defaultdict(int), torch.zeros(2)

    def after_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        self.steps += 1
        self.seen[strategy.clock.train_exp_counter] += 1
        self.mean = self.mean.lerp(torch.ones(2), self.rate)


def strategy_of(*plugins: Any) -> Any:
    return amnesiac(train_epochs=1, plugins=list(plugins), evaluator=quiet())


def saved(tmp_path, *plugins: Any) -> Any:
    return save_state(learn(strategy_of(*plugins), DIGITS.train_stream[:1]), tmp_path / "state")


def test_plain_attributes_are_saved_with_their_types(tmp_path):
    trained, loaded = Counting(), Counting()
    state = saved(tmp_path, trained)
    load_state(strategy_of(loaded), state)
    assert loaded.steps == trained.steps > 0
    assert loaded.seen == trained.seen
    assert loaded.seen.default_factory is int
    assert torch.equal(loaded.mean, trained.mean)


def test_loading_into_a_plugin_with_other_settings_is_refused(tmp_path):
    state = saved(tmp_path, Counting())
    for other, text in (
        ({"rate": 0.2}, r"Counting.rate=0.5 \(here 0.2\)"),
        ({"schedule": min}, r"schedule='max' \(here 'min'\)"),
    ):
        with pytest.raises(StateError, match=text):
            load_state(strategy_of(Counting(**other)), state)


class Keeping(SupervisedPlugin):
    """Attributes that no state can hold."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.kept, self.more = {1: [thing]}, thing


def test_attributes_that_no_state_can_hold_are_named_before_anything_is_written(tmp_path):
    things = {"Linear": nn.Linear(1, 1), "function": lambda: 1, "list_iterator": iter([1]), "object": object()}
    for kind, thing in things.items():
        text = rf"Keeping\.kept\[1\]\[0\] is a {kind}, Keeping\.more is a {kind}.*Give Keeping a state\(\)"
        with pytest.raises(StateError, match=text):
            saved(tmp_path, Keeping(thing))
        assert not (tmp_path / "state").exists()


@pytest.mark.filterwarnings("error:.*incompatible callbacks")
def test_after_loading_is_called_once_the_whole_state_is_loaded(tmp_path):
    class Looking(SupervisedPlugin):
        def after_loading(self, strategy: Any) -> None:
            self.tasks = strategy.model.tasks

    plugin = Looking()
    load_state(strategy_of(plugin), saved(tmp_path, Looking()))
    assert plugin.tasks == (0,)


def test_values_returned_by_a_state_method_are_checked(tmp_path):
    class Wrong(SupervisedPlugin):
        def state(self) -> Any:
            return {"teacher": self}

        def load_state(self, state: Any) -> None:
            pass

    with pytest.raises(StateError, match=r"Wrong\.state\(\)\.teacher is a Wrong"):
        saved(tmp_path, Wrong())


class Foreign(SupervisedPlugin):
    """A plugin from another library."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.loader = nn.Linear(1, 1), iter([1])


def test_a_plugin_of_another_library_is_saved_by_registered_conversions(tmp_path):
    def give(state: Any, held: Any, strategy: Any) -> Any:
        new = nn.Linear(1, 1)
        new.load_state_dict(state)
        return new

    register_state(Foreign, memory=Conversion(lambda memory: dict(memory.state_dict()), give), loader=None)
    trained, loaded = Foreign(), Foreign()
    loader = loaded.loader
    load_state(strategy_of(loaded), saved(tmp_path, trained))
    assert torch.equal(loaded.memory.weight, trained.memory.weight)
    assert loaded.loader is loader


def test_a_state_file_cannot_overwrite_settings_or_methods():
    plugin = Counting()
    before = dict(vars(plugin))
    for name in ("rate", "schedule", "__class__", "__dict__", "after_training_iteration"):
        with pytest.raises(StateError, match=f"invalid value in state at {name}"):
            load_state_of(plugin, {**state_of(plugin), name: 1}, None)
        assert vars(plugin) == before


KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n in (1, 2))
PEM = KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def learned():
    return learn(strategy_of(), DIGITS.train_stream[:1])


@pytest.fixture
def signed(learned, tmp_path):
    return learned.save(tmp_path / "signed", key=KEY)


def test_a_signed_state_is_loaded_with_the_signers_key_in_any_form_or_without_a_key(learned, signed):
    for key in (KEY.public_key(), KEY.public_key().public_bytes_raw(), PEM, None):
        strategy = strategy_of()
        load_state(strategy, signed, key)
        assert bits(strategy.model) == bits(learned.model)


def resealed(state, change=lambda content: None, **signature):
    """Change a state's content and its checksum, without the key, and maybe its signature; None leaves it out."""
    found = json.loads((state / STATE).read_text())
    change(found["content"])
    further = {"signature": found["signature"], **signature}
    further = further if further["signature"] is not None else {}
    (state / STATE).write_text(seal(found["content"], **HEAD, **further))


def with_another_weight(state):
    """Change a number in the tensors, and all names and checksums with it."""

    def change(content):
        file = state / content["parts"]["state"]
        tensors = load(file.read_bytes())
        next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[0] += 1
        changed = save(tensors)
        content["parts"]["state"] = part_of(changed).name
        (state / part_of(changed).name).write_bytes(changed)

    resealed(state, change)


def edited(state):
    file = state / STATE
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))


FORGED = {
    "damaged": (edited, "its checksum does not fit"),
    "unsigned": (lambda state: resealed(state, signature=None), "it is not signed: sign it"),
    "another seed": (lambda state: resealed(state, lambda c: c["body"]["host"].update(seed=7)), "does not hold"),
    "another weight": (with_another_weight, "does not hold"),
    "a number": (lambda state: resealed(state, signature=7), "its signature is none"),
    "too short": (lambda state: resealed(state, signature={"signature": "AAAA"}), "does not hold"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_state_is_refused_and_changes_nothing(kind, signed):
    forge, told = FORGED[kind]
    forge(signed)
    strategy = strategy_of()
    with unchanged(lambda: comparable_state(strategy)), pytest.raises(StateError, match=told):
        load_state(strategy, signed, KEY.public_key())
    strategy.train(DIGITS.train_stream[1])  # a strategy with an unfinished loading refuses this


def test_a_state_that_another_key_signed_is_refused(learned, tmp_path):
    learned.save(tmp_path / "state", key=OTHER)
    with pytest.raises(StateError, match="another key signed it"):
        load_state(strategy_of(), tmp_path / "state", KEY.public_key())


def test_wrong_kinds_of_keys_are_refused_before_anything_is_written_or_read(learned, tmp_path):
    for key in ("key.pem", b"short", KEY.public_key()):
        with pytest.raises(SigningError, match="private key"):
            learned.save(tmp_path / "state", key=key)
    assert not (tmp_path / "state").exists()
    for key in ("key.pem", b"short", KEY):
        with pytest.raises(SigningError, match="public key"):
            load_state(strategy_of(), tmp_path / "none", key)
