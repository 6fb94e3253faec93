"""The record of an unlearning: its content, its file format and its signature."""

import builtins
import dataclasses
import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import EWC
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.strategies import DIGITS, amnesiac, learn, make, stock
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia import DisjointSubnets, HardAttention, Pools, with_unlearning
from avalanche_amnesia.audit import UnlearningRecord, verify
from avalanche_amnesia.audit.record import RecordError
from avalanche_amnesia.audit.signing import SigningError


@pytest.fixture(scope="module")
def unlearned():
    strategy = learn(stock(EWC, epochs=1, ewc_lambda=1.0), DIGITS, 3)
    before = bits(strategy.model)
    return before, strategy, unlearning_plugin(strategy).unlearn(strategy, [1])


def test_record_has_the_hash_of_every_tensor_before_and_after_the_unlearning(unlearned):
    before, strategy, record = unlearned
    assert record.after == bits(strategy.model)
    of_changes = {change.name: change.before for change in record.changes}
    assert before == {name: of_changes.get(name, record.unchanged.get(name)) for name in before}
    assert {c.name for c in record.changes if c.after is None} == {"heads.1.weight", "heads.1.bias"}
    assert not set(of_changes) & set(record.unchanged)
    assert "heads.0.weight" in record.unchanged


def test_record_names_the_method_its_options_the_versions_and_the_data(unlearned):
    _, _, record = unlearned
    origin = record.provenance
    assert (origin.method, origin.seed) == ("EWC", 0)
    assert origin.options["EWCPlugin"]["ewc_lambda"] == 1.0
    assert origin.options["SGD"]["lr"] == 0.1
    assert origin.options["EWC"]["train_mb_size"] == 40
    assert {"python", "torch", "avalanche-lib"} <= origin.versions.keys()
    labels = DIGITS.train_stream[2].tensors[1].numpy()
    assert origin.data["2"] == hashlib.sha256(f"{len(labels)}:".encode() + labels.tobytes()).hexdigest()
    assert list(origin.data) == ["0", "1", "2"]
    assert timedelta() <= datetime.now(UTC) - datetime.fromisoformat(record.time) < timedelta(hours=1)


@dataclasses.dataclass(frozen=True)
class Settings:
    by_layer: dict


class PluginWithSettings(SupervisedPlugin):
    def __init__(self):
        super().__init__()
        self.settings = Settings({1: torch.int8, 2: (0.5, torch.float16), 3: Path})


def test_record_has_the_settings_of_masks_pools_and_user_plugins():
    benchmark, masks = with_unlearning(DIGITS, {1: [0]}), HardAttention(s_max=50.0)
    planned = make(DisjointSubnets, train_epochs=1, isolation=Pools.planned(benchmark))
    found = []
    for strategy in (amnesiac(train_epochs=1, masks=masks, plugins=[PluginWithSettings()]), planned):
        learn(strategy, benchmark, 2)
        (record,) = unlearning_plugin(strategy).records
        found.append(UnlearningRecord.from_json(record.to_json()).provenance.options)
    of_units, of_weights = found
    assert of_units["HATPlugin"]["masks"] == {"class": "HardAttention", **dataclasses.asdict(masks)}
    kept = {"1": "torch.int8", "2": [0.5, "torch.float16"], "3": "type"}
    assert of_units["PluginWithSettings"]["settings"] == {"class": "Settings", "by_layer": kept}
    assert of_weights["DisjointPlugin"]["isolation"]["slots"] == {"0": 0, "1": 1, "2": 0, "3": 2, "4": 3}
    assert of_weights["Adam"]["betas"] == [0.9, 0.999]


def test_record_is_read_back_from_its_file(unlearned, tmp_path):
    _, _, record = unlearned
    record.save(tmp_path / "record.json")
    again = UnlearningRecord.load(tmp_path / "record.json")
    assert again.to_json() == record.to_json()
    assert dataclasses.asdict(again) == dataclasses.asdict(record)
    text = (tmp_path / "record.json").read_text()
    data = json.loads(text)
    assert text.endswith("}\n")
    assert (data["plan"]["tasks"], data["plan"]["claim"]) == ([1], "approximate")
    assert data["plan"]["entries"] == record.plan.entries
    assert data["seconds"] == record.seconds > 0


def test_text_that_is_no_record_is_refused(unlearned, tmp_path):
    data = json.loads(unlearned[2].to_json())
    wrong = ({"claim": "perfect"}, {"tasks": "1"}, {"tasks": [1.5]}, {"trajectory_bytes": True})
    damaged = [json.dumps(data | {"plan": data["plan"] | one}) for one in wrong]
    for text in ["", "[]", "{}", '{"plan": 1}', "no json", "[" * 100_000, '{"record": {}, "signature": ""}', *damaged]:
        (tmp_path / "record.json").write_text(text)
        with pytest.raises(RecordError, match="this is no unlearning record"):
            UnlearningRecord.load(tmp_path / "record.json")
    (tmp_path / "record.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(RecordError, match="this is no unlearning record"):
        UnlearningRecord.load(tmp_path / "record.json")
    with pytest.raises(RecordError, match="UnlearningRecord has no claims"):
        UnlearningRecord.from_json(json.dumps(data | {"claims": "exact"}))


def test_signing_without_cryptography_names_the_package_to_install(unlearned, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SigningError, match=r"avalanche-amnesia\[sign\]"):
        unlearned[2].sign(bytes(32))


def test_a_signature_is_valid_only_for_its_record_and_key(unlearned):
    _, _, record = unlearned
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = key.public_key()
    signed = record.sign(key)
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert record.sign(bytes(range(32))) == signed  # Ed25519 is deterministic
    assert verify(signed, public).to_json() == verify(signed, pem).to_json() == record.to_json()
    assert UnlearningRecord.from_json(signed).to_json() == record.to_json()
    for text, verifier, words in (
        (signed.replace('"approximate"', '"exact"'), public, "does not hold"),
        (signed, Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key(), "does not hold"),
        (record.to_json(), public, "no signed record"),
        *((signed, wrong, r"public key|public_key") for wrong in (b"short", "text", key)),
    ):
        with pytest.raises(SigningError, match=words):
            verify(text, verifier)
