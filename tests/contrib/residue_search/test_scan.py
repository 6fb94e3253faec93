"""The audit finds planted residue of each kind, where it is, and nothing where there is none."""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import EWC, LwF, Naive, Replay
from safetensors.torch import save_file
from support.stock_hosts import HOSTS, host
from support.strategies import DIGITS, amnesiac, learn, stock
from support.strategy_state import trajectory, unlearning_plugin

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.residue_search import audit, take_evidence, take_fingerprint
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.training.plugins import UnlearningPlugin
from avalanche_amnesia.trajectory import Trajectory

STREAM = PermutedDigits(5, n_train=120, n_test=40)


class Stash(SupervisedPlugin):
    """A plugin in which residue is planted."""

    def __init__(self):
        super().__init__()
        self.kept = {}


class Case:
    """A strategy that has unlearned task 1, its record, and what it knew before."""

    def __init__(self, make, experiences):
        self.stash = Stash()
        self.strategy = make(self.stash)
        learn(self.strategy, experiences[:3])
        plugin, model = unlearning_plugin(self.strategy), self.strategy.model
        self.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.mask = model.binary_mask(1) if hasattr(model, "binary_mask") else None
        self.samples = experiences[1].tensors[0].clone()
        self.dataset = experiences[1].dataset
        self.trajectory = trajectory(self.strategy)
        self.evidence = take_evidence(self.strategy, [1], [experiences[1]])
        self.record = plugin.unlearn(self.strategy, [1])

    def audit(self, root=None, evidence=False):
        return audit(root or self.strategy, self.record, evidence=self.evidence if evidence else None)


def unlearning():
    return UnlearningPlugin(fingerprint=take_fingerprint)


@pytest.fixture(scope="module")
def masked():
    def make(stash):
        strategy = amnesiac(plugins=[stash])
        unlearning_plugin(strategy).fingerprint = take_fingerprint
        return strategy

    return Case(make, DIGITS.train_stream)


@pytest.fixture(scope="module")
def plain():
    def make(stash):
        return stock(Naive, unlearning=unlearning(), plugins=[stash], epochs=2)

    return Case(make, STREAM.train_stream)


@pytest.fixture(params=["masked", "plain"])
def case(request):
    found = request.getfixturevalue(request.param)
    found.stash.kept.clear()
    yield found
    found.stash.kept.clear()


def test_a_clean_strategy_has_no_residue_now_and_after_more_training(case):
    for evidence in (False, True):
        report = case.audit(evidence=evidence)
        assert report.clean, report.table()
        assert report.looked_at > 10
        assert "no residue found" in report.table()


@pytest.mark.parametrize("name", [*HOSTS, "amnesiac"])
def test_no_host_keeps_residue_that_an_audit_finds(name):
    strategy = amnesiac(train_epochs=1) if name == "amnesiac" else host(name, unlearning=unlearning())
    learn(strategy, STREAM.train_stream[:3])
    evidence = take_evidence(strategy, [1], [STREAM.train_stream[1]])
    record = unlearning_plugin(strategy).unlearn(strategy, [1])
    for known in (None, evidence):
        report = audit(strategy, record, evidence=known)
        assert report.clean, report.table()
    strategy.train(STREAM.train_stream[3])
    assert audit(strategy, record, evidence=evidence).clean


def backbone(case):
    return next(name for name, update in case.evidence.updates.items() if update.numel() >= 512)


def noisy_state(case):
    state, update = case.state[backbone(case)], case.evidence.updates[backbone(case)]
    return state + 0.1 * update.std() * torch.randn(state.shape)


def as_bytes(values):
    return (values / values.abs().max() * 127).round().to(torch.int8)


PLANTS = {
    "head": ("own tensor", lambda c: c.state["heads.1.weight"].clone()),
    "head in another type and shape": ("own tensor", lambda c: c.state["heads.1.weight"].numpy().astype("f8").ravel()),
    "state before": ("state before", lambda c: c.state[backbone(c)].clone()),
    "update": ("update", lambda c: c.evidence.updates[backbone(c)].clone()),
    "scaled update": ("update", lambda c: -0.01 * c.evidence.updates[backbone(c)].float().reshape(-1)),
    "state with noise": ("update", noisy_state),
    "most of the update in an anchor": (
        "update",
        lambda c: (c.evidence.after[backbone(c)] + 0.8 * c.evidence.updates[backbone(c)]).float(),
    ),
    "update beside a constant": ("update", lambda c: c.evidence.updates[backbone(c)] + 0.1),
    "state beside a constant": ("update", lambda c: c.state[backbone(c)] - 0.1),
    "next to nothing of the update": ("update", lambda c: 1e-9 * c.evidence.updates[backbone(c)]),
    "update in a byte": ("update", lambda c: as_bytes(c.evidence.updates[backbone(c)])),
    "update in a small float": ("update", lambda c: c.evidence.updates[backbone(c)].float().to(torch.float8_e4m3fn)),
    "sparse update": ("update", lambda c: c.evidence.updates[backbone(c)].to_sparse()),
    "complex update": ("update", lambda c: c.evidence.updates[backbone(c)].to(torch.complex128)),
    "data set": ("data set", lambda c: {"deep": [lambda data=c.dataset: data, c.dataset]}),
}


@pytest.mark.parametrize("evidence", [False, True], ids=["record", "evidence"])
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_residue_is_found_where_it_is(case, plant, evidence):
    torch.manual_seed(0)
    kind, make = PLANTS[plant]
    case.stash.kept["here"] = make(case)
    report = case.audit(evidence=evidence)
    kinds = {finding.kind for finding in report.findings}
    assert kinds == {kind}, report.table()
    assert all("kept['here']" in finding.path for finding in report.findings)
    assert ".plugins[" in report.findings[0].path
    assert kind in report.table()


@pytest.mark.parametrize("make", [lambda m: m.clone(), lambda m: m.float() * 3, lambda m: m.float() - 0.1])
def test_a_mask_is_found_in_any_dress(masked, make):
    masked.stash.kept["here"] = make(masked.mask)
    assert [finding.kind for finding in masked.audit().findings] == ["mask"]
    masked.stash.kept.clear()


def test_samples_are_found_with_the_evidence(case):
    case.stash.kept["here"] = torch.cat([DIGITS.train_stream[3].tensors[0][:5], case.samples[7:10]])
    assert case.audit().clean
    (finding,) = case.audit(evidence=True).findings
    assert (finding.kind, finding.name) == ("sample", "3 of 8")


def test_without_the_purge_the_audit_finds_what_hosts_keep(monkeypatch):
    from avalanche_amnesia.unlearning.purging import purgers

    monkeypatch.setattr(purgers, "_PURGERS", {})
    for make, options, kind, where in (
        (EWC, {"ewc_lambda": 1.0}, "own tensor", "saved_params"),
        (LwF, {"alpha": 1.0, "temperature": 2.0}, "own tensor", "prev_model"),
        (Replay, {"mem_size": 30}, "data set", "storage_policy"),
    ):
        strategy = stock(
            make, epochs=1, unlearning=UnlearningPlugin(allow_unknown=True, fingerprint=take_fingerprint), **options
        )
        learn(strategy, STREAM.train_stream[:3])
        report = audit(strategy, unlearning_plugin(strategy).unlearn(strategy, [1]))
        assert any(f.kind == kind and where in f.path for f in report.findings), report.table()


# Files ------------------------------------------------------------------------------------------------------------


def files(case, folder):
    """One planted file of each kind: file name → kind of finding."""
    name = backbone(case)
    torch.save({"model": case.state}, folder / "checkpoint.pt")
    save_file({"x": case.evidence.updates[name].contiguous()}, folder / "update.safetensors")
    np.savez(folder / "arrays.npz", a=np.arange(40), b=case.state["heads.1.weight"].numpy())
    np.save(folder / "array.npy", case.state[name].numpy())
    (folder / "values.json").write_text(json.dumps({"a": [1, 2], "head": case.state["heads.1.weight"].tolist()}))
    beside = {"traces": [1, 2], "sketches": [3, 4], "head": case.state["heads.1.weight"].tolist()}
    (folder / "disguised.json").write_text(json.dumps(beside))
    return {
        "disguised.json": {"own tensor"},
        "checkpoint.pt": {"own tensor", "state before", "name"},
        "update.safetensors": {"update"},
        "arrays.npz": {"own tensor"},
        "array.npy": {"state before"},
        "values.json": {"own tensor"},
    }


def test_residue_in_files_is_found(case, tmp_path):
    expected = files(case, tmp_path)
    report = case.audit(tmp_path)
    for file, kinds in expected.items():
        found = {finding.kind for finding in report.findings if f"/{file}" in finding.path}
        assert kinds <= found, (file, report.table())
    assert report.unread == ()


def test_files_of_the_unlearned_model_are_clean(case, tmp_path):
    torch.save(case.strategy.model.state_dict(), tmp_path / "model.pt")
    Trajectory(path=tmp_path / "trajectory").restore(case.trajectory.logs)
    case.record.save(tmp_path / "record.json")
    report = case.audit(tmp_path)
    assert report.clean, report.table()
    assert report.looked_at > 5


def run_lines(folder, **logged):
    """A run of JSON lines with one row."""
    values = {name.replace("__", "/"): value for name, value in logged.items()}
    lines = [{"kind": "run", "id": "abc"}, {"kind": "row", "values": values}]
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_a_dashboard_logged_of_the_task_is_found(case, tmp_path):
    head = case.state["heads.1.bias"]
    run_lines(tmp_path, Acc__Task001=0.5, Mask__Task002={"_type": "image"}, head=head[:2].tolist())
    report = case.audit(tmp_path)
    assert report.clean, report.table()
    assert report.looked_at == 2
    weights = case.state["heads.1.weight"].flatten().tolist()
    run_lines(tmp_path, Mask__Task001={"_type": "image"}, W={"_type": "histogram", "values": weights})
    found = {(finding.kind, finding.path.split(": ")[1]) for finding in case.audit(tmp_path).findings}
    assert found == {("log", "line 2/values/Mask/Task001"), ("own tensor", "line 2/values/W/values")}


def test_the_command_line_says_it_by_its_status(case, tmp_path, capsys):
    record = tmp_path / "record.json"
    case.record.save(record)
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save(case.strategy.model.state_dict(), folder / "model.pt")
    assert main(["audit", str(folder), "--record", str(record)]) == 0
    assert "no residue found" in capsys.readouterr().out
    (folder / "notes.txt").write_text("τ " * 3000)
    assert main(["audit", str(folder), "--record", str(record)]) == 0
    capsys.readouterr()
    (folder / "whole.pkl").write_bytes(b"\x80\x04\x8c\x02os\x94.")
    (folder / "mask.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "run-abc.wandb").write_bytes(b":W&B\xe1\xbe\x00")
    assert main(["audit", str(folder), "--record", str(record)]) == 3
    said = " ".join(capsys.readouterr().out.split())  # whatever the width that it is wrapped at
    assert all(f"not looked into: {folder / name}" in said for name in ("whole.pkl", "mask.png", "run-abc.wandb"))
    assert "without running code from it" in said
    assert "W&B's own log is not looked into" in said
    torch.save(case.state, folder / "old.pt")
    assert main(["audit", str(folder), "--record", str(record)]) == 1
    assert "old.pt" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "nowhere"), "--record", str(record)]) == 2
    assert main(["audit", str(folder), "--record", str(folder / "model.pt")]) == 2


def test_a_model_alone_is_looked_through(masked):
    assert audit(masked.strategy.model, masked.record).clean
    planted = deepcopy(masked.strategy.model)
    planted.load_state_dict(masked.state)
    found = audit(planted, masked.record).findings
    assert {finding.path.partition(".")[0] for finding in found} == {"model"}


@pytest.mark.parametrize("wrong", [3, None, {}])
def test_what_can_not_be_audited_is_not_called_clean(masked, wrong):
    with pytest.raises(TypeError, match="subject must be a strategy, a model"):
        audit(wrong, masked.record)
    with pytest.raises(TypeError, match="record must be an UnlearningRecord"):
        audit(masked.strategy, wrong)


def test_a_fingerprint_gives_no_tensor_away(case):
    """At most one number per sixteen entries, and hashes."""
    mark = case.record.fingerprint
    assert mark.sketches
    for name, of_tensor in mark.sketches.items():
        assert len(of_tensor.update) * 16 <= of_tensor.size == case.evidence.updates[name].numel()
