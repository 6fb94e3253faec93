"""A state is unlearned and verified by a process that never saw the training script."""

import json
import os
import sys
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.forked import run_script

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.lab.command_line import main

SCRIPT = """
import sys
import torch
from torch.optim import Adam
from avalanche_amnesia import AmnesiacHAT, DisjointModel, DisjointSubnets, MaskedModel
from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.models import MLP

def make_strategy():
    torch.manual_seed(0)
    model = MaskedModel(MLP(64, hidden=(24,), features=16))
    return AmnesiacHAT(model=model, optimizer=Adam(model.parameters(), lr=1e-2), train_mb_size=40, train_epochs=2)

def make_disjoint():
    torch.manual_seed(0)
    model = DisjointModel(MLP(64, hidden=(24,), features=16))
    return DisjointSubnets(model=model, optimizer=Adam(model.parameters(), lr=1e-2), train_mb_size=40)

def broken():
    raise OSError("no data")

def digits():
    return SplitDigits(n_train=400, n_test=200)

if __name__ == "__main__":
    for make, name in ((make_strategy, "state"), (make_disjoint, "disjoint")):
        strategy = make()
        for experience in digits().train_stream[:3]:
            strategy.train(experience)
        strategy.save(name)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    run_script(folder / "train.py")
    return folder


@pytest.fixture
def run_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    yield trained
    sys.modules.pop("train", None)


def unlearn(*words: str) -> int:
    return main(["unlearn", "state", "--tasks", "1", "--factory", "train:make_strategy", *words])


def today() -> str:
    day = datetime.now(UTC)
    return f"{day.day} {day:%B %Y}"


def test_a_state_is_unlearned_and_verified(run_folder, capsys):
    assert unlearn("--record", "r.json", "--out", "after") == 0
    told = capsys.readouterr().out
    assert told.startswith("Task 1 went out of after.\n")
    assert "state is as it was and still holds all of it: delete it.\n" in told
    assert "Unlearned task 1 (after 3 trainings)" in told
    assert max(map(len, told.splitlines())) <= 60
    assert UnlearningRecord.load("r.json").remaining == (0, 2)
    assert main(["verify", "r.json", "--state", "after"]) == 0
    capsys.readouterr()
    assert main(["verify", "r.json", "--state", "state"]) == 1
    assert "tensors differ" in capsys.readouterr().out
    for state, as_left in (("after", True), ("state", False)):
        assert main(["verify", "r.json", "--state", state, "--json"]) == (0 if as_left else 1)
        told = json.loads(capsys.readouterr().out)
        assert (told["signed"], told["state_as_left"]) == (None, as_left)
        assert ("heads.1.weight" in told["differ"]) is not as_left


def test_a_record_is_signed_and_its_signature_checked(run_folder, capsys):
    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (run_folder / "key.pem").write_bytes(private)
    (run_folder / "public.pem").write_bytes(public)
    assert unlearn("--record", "signed.json", "--out", "signed", "--sign", "key.pem") == 0
    checked = ["verify", "signed.json", "--public-key", "public.pem", "--state"]
    assert main([*checked, "signed"]) == 0
    further = ["--tasks", "2", "--factory", "train:make_strategy", "--record", "2.json", "--public-key", "public.pem"]
    assert main(["unlearn", "signed", *further, "--out", "unsigned"]) == 0
    capsys.readouterr()
    for state in ("state", "unsigned"):
        assert main([*checked, state]) == 2
        assert "it is not signed" in capsys.readouterr().err
    assert main(["unlearn", "state", *further]) == 2
    assert "it is not signed" in capsys.readouterr().err
    forged = (run_folder / "signed.json").read_text().replace('"approximate"', '"exact"')
    (run_folder / "forged.json").write_text(forged)
    assert main(["verify", "forged.json", "--public-key", "public.pem"]) == 2
    assert "signature" in capsys.readouterr().err


def test_the_result_is_printed_as_json_for_programs(run_folder, capsys):
    assert unlearn("--record", "copies/record.json", "--out", "copies/now", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["state"], done["record_file"]) == ("copies/now", "copies/record.json")
    assert done["record"] == json.loads((run_folder / "copies" / "record.json").read_text())
    assert done["told"][0] == "Task 1 went out of copies/now."


PART = ["unlearn", "disjoint", "--task", "1", "--factory", "train:make_disjoint", "--record", "part.json"]


def test_samples_and_classes_of_a_task_go(run_folder, capsys):
    asked = ["--samples", "0", "7", "--classes", "1", "--benchmark", "train:digits", "--out", "rest"]
    assert main([*PART, *asked]) == 0
    record = UnlearningRecord.load("part.json")
    assert (record.task, record.plan.classes, record.claim, record.remaining) == (1, (1,), "exact", (0, 1, 2))
    told = capsys.readouterr().out
    assert f"{len(record.plan.samples)} samples of task 1 (all of classes 1) went out of rest." in " ".join(
        told.split()
    )
    assert "It equals, bit for bit, a state that never had any of it" in told
    assert main(["verify", "part.json", "--state", "rest"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--benchmark", "train:digits"], "--task TASK with --samples, --classes or both"),
        (["--samples", "1"], "--task needs --benchmark MODULE:NAME"),
        (["--samples", "1", "--benchmark", "train:torch"], "no benchmark"),
        (["--samples", "999", "--benchmark", "train:digits"], "has 80 samples"),
        (["--samples", "1", "--tasks", "1", "--benchmark", "train:digits"], "unlearn needs one of"),
    ],
)
def test_a_bad_request_for_samples_is_told(words, told, run_folder, capsys):
    assert main([*PART[:-1], "bad.json", *words]) == 2
    assert told in capsys.readouterr().err
    assert not os.path.exists("bad.json")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tasks", "7"], "task 7"),
        (["--factory", "train"], "MODULE:NAME"),
        (["--factory", "train:missing"], "missing"),
        (["--factory", "absent:make"], "No module named"),
        (["--out", "."], "no part of a state"),
        (["--sign", "absent.pem"], "--sign absent.pem: there is no such file; give a PEM file"),
        (["--sign", "train.py"], "the private key can't be read: give the 32 raw bytes of an Ed25519PrivateKey"),
        (["--tasks", "x"], "amnesia: --tasks must be int, got 'x'\n"),
        (["--factory", "train:Adam"], "--factory train:Adam must be a function without arguments"),
        (["--factory", "train:broken"], "--factory train:broken raised OSError: no data"),
    ],
)
def test_a_bad_request_changes_nothing(words, told, run_folder, capsys):
    before = {file.name: file.read_bytes() for file in (run_folder / "state").iterdir()}
    assert unlearn("--record", "bad.json", *words) == 2
    assert told in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (run_folder / "state").iterdir()} == before
    assert not os.path.exists("bad.json")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["unlearn", "train.py", "--tasks", "1", "--factory", "train:make_strategy", "--record", "bad.json"],
            "no state",
        ),
        (["verify", "state"], "state is a folder: give the JSON file of an unlearning's record"),
        (["verify", "absent.json"], "there is no file absent.json"),
    ],
    ids=["a file for a state", "a folder for a record", "no record"],
)
def test_what_lies_there_is_told(words, told, run_folder, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_missing_options_are_named_as_they_are_given(capsys):
    assert main(["unlearn", "state", "--tasks", "1"]) == 2
    told = capsys.readouterr().err
    assert main(["unlearn"]) == 2
    whole = "amnesia: amnesia unlearn needs state, --factory, --record; amnesia unlearn --help explains\n"
    assert capsys.readouterr().err == whole
    assert told == "amnesia: amnesia unlearn needs --factory, --record; amnesia unlearn --help explains\n"
