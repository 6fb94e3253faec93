"""The record of an unlearning: what it says, that it can be read again, and that a signature holds."""

import dataclasses
import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import EWC
from support.strategies import DIGITS, amnesiac, learn, make, stock, trained
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia import DisjointSubnets, HardAttention, Pools, UnlearningPlugin, with_unlearning
from avalanche_amnesia.audit import RecordError, SigningError, UnlearningRecord, verify


@pytest.fixture(scope="module")
def unlearned():
    strategy = stock(EWC, epochs=1, ewc_lambda=1.0, unlearning=UnlearningPlugin())
    learn(strategy, DIGITS.train_stream[:3])
    before = bits(strategy.model)
    return before, strategy, unlearning_plugin(strategy).unlearn(strategy, [1])


def test_it_hashes_every_tensor_before_and_after(unlearned):
    before, strategy, record = unlearned
    assert record.after == bits(strategy.model)
    of_changes = {change.name: change.before for change in record.changes}
    assert before == {name: of_changes.get(name, record.unchanged.get(name)) for name in before}
    assert {c.name for c in record.changes if c.after is None} == {"heads.1.weight", "heads.1.bias"}
    assert not set(of_changes) & set(record.unchanged)
    assert "heads.0.weight" in record.unchanged


def test_a_head_that_a_compensation_swaps_is_among_the_changes():
    strategy = trained(2, train_epochs=1)
    record = strategy.unlearn([0])
    assert record.after == bits(strategy.model)
    changed = [change.name for change in record.changes if change.before and change.after]
    assert ("heads.1.weight" in changed) == (1 in record.plan.compensated)


def test_it_says_where_the_model_comes_from(unlearned):
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


def test_it_says_how_masks_were_learned_and_weights_dealt():
    benchmark, masks = with_unlearning(DIGITS, {1: [0]}), HardAttention(s_max=50.0)
    planned = make(DisjointSubnets, train_epochs=1, isolation=Pools.planned(benchmark))
    found = []
    for strategy in (amnesiac(train_epochs=1, masks=masks), planned):
        learn(strategy, benchmark, 2)
        (record,) = unlearning_plugin(strategy).records
        found.append(UnlearningRecord.from_json(record.to_json()).provenance.options)
        assert found[-1] == record.provenance.options
    of_units, of_weights = found
    assert of_units["HATPlugin"]["masks"] == {"class": "HardAttention", **dataclasses.asdict(masks)}
    assert of_weights["DisjointPlugin"]["isolation"]["slots"] == {"0": 0, "1": 1, "2": 0, "3": 2, "4": 3}
    assert of_weights["Adam"]["betas"] == [0.9, 0.999]


def test_settings_of_a_users_plugin_of_any_type_are_values_of_json():
    @dataclasses.dataclass(frozen=True)
    class Settings:
        by_layer: dict

    class Plugin(SupervisedPlugin):
        settings = None

    strategy, plugin = amnesiac(train_epochs=1), Plugin()
    plugin.settings = Settings({1: torch.int8, 2: (0.5, torch.float16), 3: Path})
    strategy.plugins.append(plugin)
    strategy.train(DIGITS.train_stream[0])
    record = UnlearningRecord.from_json(strategy.unlearn([0]).to_json())
    kept = {"1": "torch.int8", "2": [0.5, "torch.float16"], "3": "type"}
    assert record.provenance.options["Plugin"]["settings"] == {"class": "Settings", "by_layer": kept}


def test_it_can_be_read_again(unlearned, tmp_path):
    _, _, record = unlearned
    record.save(tmp_path / "record.json")
    again = UnlearningRecord.load(tmp_path / "record.json")
    assert again.to_json() == record.to_json()
    assert again.plan.entries == record.plan.entries
    assert again.tasks == (1,)
    assert dataclasses.asdict(again) == dataclasses.asdict(record)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": 1}', "no json", '{"record": {}, "signature": ""}'])
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RecordError, match="this is no unlearning record"):
        UnlearningRecord.load(tmp_path / "record.json")


def test_an_unknown_field_is_refused(unlearned):
    data = json.loads(unlearned[2].to_json()) | {"claims": "exact"}
    with pytest.raises(RecordError, match="UnlearningRecord has no claims"):
        UnlearningRecord.from_json(json.dumps(data))


@pytest.mark.parametrize("wrong", [{"claim": "perfect"}, {"tasks": "1"}, {"tasks": [1.5]}, {"trajectory_bytes": True}])
def test_a_value_of_another_kind_is_refused(unlearned, wrong):
    data = json.loads(unlearned[2].to_json())
    data["plan"] |= wrong
    with pytest.raises(RecordError, match="this is no unlearning record"):
        UnlearningRecord.from_json(json.dumps(data))


def test_without_cryptography_signing_says_what_to_install(unlearned, monkeypatch):
    import builtins

    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SigningError, match=r"avalanche-amnesia\[sign\]"):
        unlearned[2].sign(bytes(32))


def test_a_signature_holds_for_its_record_and_key_alone(unlearned):
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    _, _, record = unlearned
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    signed = record.sign(key)
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert record.sign(bytes(range(32))) == signed  # Ed25519 is deterministic
    assert verify(signed, key.public_key()).to_json() == verify(signed, pem).to_json() == record.to_json()
    assert UnlearningRecord.from_json(signed).to_json() == record.to_json()
    with pytest.raises(SigningError, match="does not hold"):
        verify(signed.replace('"approximate"', '"exact"'), key.public_key())
    with pytest.raises(SigningError, match="does not hold"):
        verify(signed, ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key())
    with pytest.raises(SigningError, match="no signed record"):
        verify(record.to_json(), key.public_key())
    for wrong in (b"short", "text", key):
        with pytest.raises(SigningError, match=r"public key|public_key"):
            verify(signed, wrong)


def test_the_record_survives_json(tmp_path):
    strategy = trained(2, train_epochs=1)
    record = strategy.unlearn([0])
    record.save(tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    data = json.loads(text)
    assert text.endswith("}\n")
    assert data["plan"]["tasks"] == [0]
    assert data["plan"]["claim"] == "approximate"
    assert data["plan"]["entries"] == record.plan.entries
    assert {c["name"]: c["before"] for c in data["changes"]} == {c.name: c.before for c in record.changes}
    assert data["seconds"] == record.seconds > 0
