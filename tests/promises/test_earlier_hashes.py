"""Records, logs and saved states of earlier versions, whose hashes are SHA-256, are still recognised."""

import hashlib
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from support.strategies import trained
from support.strategy_state import trajectory, unlearning_plugin

from avalanche_amnesia.bits import fits, state_hashes, tensor_hash
from avalanche_amnesia.contrib.residue_search import audit
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.training.host.saving import save_state
from avalanche_amnesia.trajectory import Trajectory, TrajectoryError, log_files


def as_earlier(record, before, after):
    """A record whose hashes are those of an earlier version."""
    old, new = state_hashes(before, "sha256"), state_hashes(after, "sha256")
    changes = tuple(replace(c, before=old.get(c.name), after=new.get(c.name)) for c in record.changes)
    return replace(record, changes=changes, unchanged={name: new[name] for name in record.unchanged})


def state(strategy):
    return {name: value.clone() for name, value in strategy.model.state_dict().items()}


@pytest.mark.parametrize("tensor", [torch.randn(3, 5), torch.zeros(0), torch.ones(7).bool(), torch.randn(4).bfloat16()])
def test_a_hash_says_how_it_was_made(tensor):
    new, old = tensor_hash(tensor), tensor_hash(tensor, "sha256")
    assert new.startswith("blake3:")
    told = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    assert old == hashlib.sha256(told + bytes(tensor.view(torch.uint8).numpy().data)).hexdigest()
    assert fits(tensor, new)
    assert fits(tensor, old)
    other = torch.cat([tensor, tensor[:1]]) if len(tensor) else torch.zeros(1)
    assert not fits(other, new)
    assert not fits(other, old)


def test_an_earlier_record_verifies_a_state(tmp_path, capsys):
    strategy = trained(3)
    before = state(strategy)
    record = strategy.unlearn([1])
    as_earlier(record, before, state(strategy)).save(tmp_path / "record.json")
    save_state(strategy, tmp_path / "state")
    assert main(["verify", str(tmp_path / "record.json"), "--state", str(tmp_path / "state")]) == 0
    with torch.no_grad():
        next(strategy.model.parameters()).add_(1)
    save_state(strategy, tmp_path / "other")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "record.json"), "--state", str(tmp_path / "other")]) == 1
    assert "1 tensors differ" in capsys.readouterr().out


def test_an_audit_by_an_earlier_record_finds_copies():
    strategy = trained(3)
    before = state(strategy)
    record = as_earlier(strategy.unlearn([1]), before, state(strategy))
    kept = before["heads.1.weight"]
    for now in (record, strategy.unlearn([2])):
        assert not audit(strategy, now).findings
    strategy.kept = kept
    assert [finding.name for finding in audit(strategy, record).findings] == ["heads.1.weight"]


def test_a_state_with_earlier_hashes_is_exact_until_somebody_writes_into_it():
    strategy = trained(3, compensation="none")
    claims = unlearning_plugin(strategy).claims
    claims._hashes = state_hashes(strategy.model.state_dict(), "sha256")
    found = strategy.plan_unlearning([1])
    assert not any("changed by something else" in reason for reason in found.reasons)
    with torch.no_grad():
        strategy.model.backbone.get_parameter("layers.0.weight").add_(1)
    found = strategy.plan_unlearning([1])
    assert any("layers.0.weight" in reason and "changed by something else" in reason for reason in found.reasons)


def test_an_earlier_directory_of_logs_is_read_and_its_damage_found(tmp_path, monkeypatch):
    strategy = trained(2)
    with monkeypatch.context() as earlier:
        digest = log_files._digest_of
        earlier.setattr(log_files, "_digest_of", lambda task, log, algorithm="sha256": digest(task, log, "sha256"))
        Trajectory(path=tmp_path).restore(trajectory(strategy).logs)
    read = Trajectory(path=tmp_path)
    assert read.tasks == (0, 1)
    parameters = {name: p.detach() for name, p in strategy.model.named_parameters()}
    removal = read.remove([0], parameters)
    assert bits_of(removal.values) == bits_of(trajectory(strategy).remove([0], parameters).values)
    path = read.logs[0].file.path
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(TrajectoryError, match="damaged"):
        Trajectory(path=tmp_path)


def bits_of(values):
    return {name: tensor_hash(value) for name, value in values.items()}


LAYOUTS = {
    "transposed": torch.randn(3, 4, 5).transpose(0, 2),
    "in steps": torch.randn(10)[::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "a kernel of 1×1 whose channels lie last": torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last": torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last),
    "a number": torch.tensor(3),
    "a parameter": torch.nn.Parameter(torch.randn(7)),
    "without numpy": torch.randn(3, 4).bfloat16().T,
    "one of these alone": torch.tensor(3.0).bfloat16(),
    "much": torch.arange(2**17),
    "much, transposed": torch.randn(300, 200).T,
    "none of these": torch.zeros(0, 3).bfloat16(),
    "eight bits": torch.randn(6).to(torch.float8_e4m3fn),
    "complex": torch.randn(4, dtype=torch.complex64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hash_is_of_the_bits_in_order_however_they_lie(layout):
    tensor = LAYOUTS[layout]
    flat = tensor.detach().contiguous().clone().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    told = f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bytes(flat.tolist())
    assert tensor_hash(tensor, "sha256") == hashlib.sha256(told).hexdigest()
    assert tensor_hash(tensor) == f"blake3:{blake3(told).hexdigest()}"
