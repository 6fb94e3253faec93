"""A signed state: loaded with its signer's key, and refused if anybody else wrote it."""

import json
import shutil
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
from avalanche_amnesia.saving.files import HEAD, STATE, part_name, sealed
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


@pytest.mark.parametrize(
    "key", [KEY.public_key(), KEY.public_key().public_bytes_raw(), PEM, None], ids=["key", "raw", "PEM", "none"]
)
def test_it_is_loaded_with_its_signers_key_or_with_none(key, learned, signed):
    strategy = built()
    load_state(strategy, signed, key)
    assert bits(strategy.model) == bits(learned.model)


def resealed(state, change, keep_signature=True):
    """Change a state's content as somebody does who has no key."""
    found = json.loads((state / STATE).read_text())
    change(found["content"])
    further = {"signature": found["signature"]} if keep_signature else {}
    (state / STATE).write_text(sealed(found["content"], **HEAD, **further))


def with_another_weight(state):
    """Change a number in the tensors, and all names and checksums with it."""

    def change(content):
        file = state / content["parts"]["state"]
        tensors = load(file.read_bytes())
        next(tensor for tensor in tensors.values() if tensor.is_floating_point()).view(-1)[0] += 1
        changed = save(tensors)
        content["parts"]["state"] = part_name(changed)
        (state / part_name(changed)).write_bytes(changed)

    resealed(state, change)


def with_signature(state, signature):
    found = json.loads((state / STATE).read_text())
    (state / STATE).write_text(sealed(found["content"], **HEAD, signature=signature))


FORGED = {
    "unsigned": (
        lambda state: resealed(state, lambda content: None, keep_signature=False),
        "it is not signed: sign it",
    ),
    "another seed": (lambda state: resealed(state, lambda c: c["body"]["host"].update(seed=7)), "does not hold"),
    "another weight": (with_another_weight, "does not hold"),
    "no signature": (lambda state: with_signature(state, None), "it is not signed"),
    "a number": (lambda state: with_signature(state, 7), "its signature is none"),
    "not in base64": (lambda state: with_signature(state, {"signature": "?"}), "its signature is none"),
    "too short": (lambda state: with_signature(state, {"signature": "AAAA"}), "does not hold"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_the_signer_did_not_write_is_refused_and_nothing_changed(kind, signed):
    forge, told = FORGED[kind]
    forge(signed)
    strategy = built()
    with unchanged(lambda: comparable_state(strategy)), pytest.raises(StateError, match=told):
        load_state(strategy, signed, KEY.public_key())
    strategy.train(DIGITS.train_stream[1])  # which a strategy whose loading did not finish refuses


def test_another_signers_and_an_unsigned_state_are_refused(learned, tmp_path):
    for key, told in ((OTHER, "another key signed it"), (None, "it is not signed")):
        learned.save(tmp_path / "state", key=key)
        with pytest.raises(StateError, match=told):
            load_state(built(), tmp_path / "state", KEY.public_key())


@pytest.mark.parametrize("key", ["key.pem", b"short", KEY.public_key()], ids=["text", "short", "public"])
def test_what_is_no_private_key_is_refused_before_anything_is_written(key, learned, tmp_path):
    with pytest.raises(SigningError, match="private key"):
        learned.save(tmp_path / "state", key=key)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("key", ["key.pem", b"short", KEY], ids=["text", "short", "private"])
def test_what_is_no_public_key_is_refused_before_anything_is_read(key, tmp_path):
    with pytest.raises(SigningError, match="public key"):
        load_state(built(), tmp_path / "none", key)


def test_damage_is_told_as_damage(signed, tmp_path):
    shutil.copytree(signed, tmp_path / "damaged")
    text = (signed / STATE).read_text()
    (tmp_path / "damaged" / STATE).write_text(text.replace('"seed": 0', '"seed": 1'))
    assert text != (tmp_path / "damaged" / STATE).read_text()
    with pytest.raises(StateError, match="its checksum does not fit"):
        load_state(built(), tmp_path / "damaged", KEY.public_key())
