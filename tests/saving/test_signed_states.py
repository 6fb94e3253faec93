"""A signed state is loaded with its signer's key, and refused if another program changed it."""

import json
from functools import partial

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load, save
from support.interruptions import comparable_state
from support.strategies import DIGITS, brief, learn, quiet
from support.strategy_state import bits, unchanged

from avalanche_amnesia.audit import SigningError
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import HEAD, STATE, part_of, sealed
from avalanche_amnesia.training import load_state

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n in (1, 2))
PEM = KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


built = partial(brief, evaluator=quiet)


@pytest.fixture(scope="module")
def learned():
    return learn(built(), DIGITS.train_stream[:1])


@pytest.fixture
def signed(learned, tmp_path):
    return learned.save(tmp_path / "signed", key=KEY)


def test_a_signed_state_is_loaded_with_the_signers_key_in_any_form_or_without_a_key(learned, signed):
    for key in (KEY.public_key(), KEY.public_key().public_bytes_raw(), PEM, None):
        strategy = built()
        load_state(strategy, signed, key)
        assert bits(strategy.model) == bits(learned.model)


def resealed(state, change=lambda content: None, **signature):
    """Change a state's content and its checksum, without the key, and maybe its signature; None leaves it out."""
    found = json.loads((state / STATE).read_text())
    change(found["content"])
    further = {"signature": found["signature"], **signature}
    further = further if further["signature"] is not None else {}
    (state / STATE).write_text(sealed(found["content"], **HEAD, **further))


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
    strategy = built()
    with unchanged(lambda: comparable_state(strategy)), pytest.raises(StateError, match=told):
        load_state(strategy, signed, KEY.public_key())
    strategy.train(DIGITS.train_stream[1])  # a strategy with an unfinished loading refuses this


def test_a_state_that_another_key_signed_is_refused(learned, tmp_path):
    learned.save(tmp_path / "state", key=OTHER)
    with pytest.raises(StateError, match="another key signed it"):
        load_state(built(), tmp_path / "state", KEY.public_key())


def test_wrong_kinds_of_keys_are_refused_before_anything_is_written_or_read(learned, tmp_path):
    for key in ("key.pem", b"short", KEY.public_key()):
        with pytest.raises(SigningError, match="private key"):
            learned.save(tmp_path / "state", key=key)
    assert not (tmp_path / "state").exists()
    for key in ("key.pem", b"short", KEY):
        with pytest.raises(SigningError, match="public key"):
            load_state(built(), tmp_path / "none", key)
