"""Commands that unlearn, sign and verify a saved state, in another process than the training."""

import json
import os
import shutil
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.forked import run_script

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.saving.files import Part, read_state, write_state

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

GAIN = 1.0

class Loss(torch.nn.Module):
    def forward(self, x, y):
        return GAIN * torch.nn.functional.cross_entropy(x, y)

def make_own():
    strategy = make_disjoint()
    strategy._criterion = Loss()
    return strategy

def broken():
    raise OSError("no data")

def digits():
    return SplitDigits(n_train=400, n_test=200)

if __name__ == "__main__":
    for make, name in ((make_strategy, "state"), (make_disjoint, "disjoint"), (make_own, "own")):
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


def test_a_state_is_unlearned_and_verified(run_folder, capsys):
    assert unlearn("--record", "r.json", "--out", "after") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Task 1 went out of after.\n")
    assert "state is as it was and still holds all of it: delete it.\n" in printed
    assert "Unlearned task 1 (after 3 trainings)" in printed
    assert UnlearningRecord.load("r.json").remaining == (0, 2)
    for state, as_left in (("after", True), ("state", False)):
        assert main(["verify", "r.json", "--state", state]) == (0 if as_left else 1)
        assert ("parts differ" in capsys.readouterr().out) is not as_left
        assert main(["verify", "r.json", "--state", state, "--json"]) == (0 if as_left else 1)
        found = json.loads(capsys.readouterr().out)
        assert (found["signed"], found["state_as_left"]) == (None, as_left)
        assert ("heads.1.weight" in found["differ"]) is not as_left
    assert unlearn("--record", "copies/record.json", "--out", "copies/now", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["state"], done["record_file"]) == ("copies/now", "copies/record.json")
    assert done["record"] == json.loads((run_folder / "copies" / "record.json").read_text())


def test_a_state_that_still_has_updates_and_no_record_of_the_unlearning_differs(run_folder, capsys):
    assert unlearn("--record", "r.json", "--out", "after") == 0
    (new, parts), (old, old_parts) = read_state(run_folder / "after"), read_state(run_folder / "state")
    tensors = {**old_parts["state"], **parts["state"]}
    mixed = {**old_parts, **{name: part for name, part in parts.items() if name.startswith("model")}}
    write_state(run_folder / "mixed", new | {"plugins": old["plugins"]}, mixed | {"state": Part(tensors)})
    capsys.readouterr()
    assert main(["verify", "r.json", "--state", "mixed"]) == 1
    assert "the update of task 1, its last record" in capsys.readouterr().out


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


PART = ["unlearn", "disjoint", "--task", "1", "--factory", "train:make_disjoint", "--record"]


def test_samples_and_classes_of_a_task_are_unlearned(run_folder, capsys):
    asked = ["--samples", "0", "7", "--classes", "1", "--benchmark", "train:digits", "--out", "rest"]
    assert main([*PART, "part.json", *asked]) == 0
    record = UnlearningRecord.load("part.json")
    assert (record.task, record.plan.classes, record.claim, record.remaining) == (1, (1,), "exact", (0, 1, 2))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(record.plan.samples)} samples of task 1 (all of classes 1) went out of rest." in printed
    assert "It equals, bit for bit, a state that never had any of it" in printed
    assert main(["verify", "part.json", "--state", "rest"]) == 0


OWN = ["own", "--factory", "train:make_own", "--record", "own.json"]


def prove_own(capsys, *words) -> tuple[int, str, UnlearningRecord]:
    status = main(["prove", *OWN, "--benchmark", "train:digits", *words])
    return status, " ".join(capsys.readouterr().out.split()), UnlearningRecord.load("own.json")


def test_a_conditional_record_is_proved_in_another_process_until_its_code_is_edited(run_folder, capsys):
    assert main(["unlearn", *OWN, "--tasks", "1"]) == 0
    assert UnlearningRecord.load("own.json").claim == "conditional"
    status, printed, record = prove_own(capsys, "--tasks", "2", "--store", "kept")
    assert (status, record.claim, record.proof.tasks) == (0, "conditional", (2,))
    words = ["prove", *OWN, "--benchmark", "train:digits"]
    (run_folder / "prove.py").write_text(f"from avalanche_amnesia.lab.command_line import main\nmain({words})\n")
    run_script(run_folder / "prove.py")  # this process has trained the task in other tests
    record = UnlearningRecord.load("own.json")
    assert (record.claim, record.proved, record.proof.apart) == ("exact", True, True)
    assert main(["verify", "own.json", "--state", "own"]) == 0
    capsys.readouterr()
    script = run_folder / "train.py"
    script.write_text(SCRIPT.replace("GAIN = 1.0", "GAIN = 1.01"))
    sys.modules.pop("train")
    status, printed, record = prove_own(capsys)
    script.write_text(SCRIPT)
    assert (status, record.claim, record.proof) == (1, "approximate", None)
    told = "task 0, trained again without the unlearned data, has other bits, first in heads.0.bias."
    assert printed.startswith(told)
    assert main(["prove", *OWN, "--benchmark", "train:digits"]) == 2
    assert "this record is approximate (task 0, trained again" in capsys.readouterr().err


def test_a_module_that_trains_again_when_it_is_imported_is_refused(run_folder, capsys):
    shutil.copytree(run_folder / "state", run_folder / "trained_again")
    at_import = SCRIPT.replace('if __name__ == "__main__"', "if True").replace('"state"', '"trained_again"')
    (run_folder / "careless.py").write_text(at_import.replace("train_stream[:3]", "train_stream[:2]"))
    words = ["unlearn", "trained_again", "--tasks", "1", "--factory", "careless:make_strategy", "--record", "bad.json"]
    assert main(words) == 2
    message = "importing careless:make_strategy changed trained_again: put what it trains under if __name__"
    assert message in capsys.readouterr().err


TASK = ["unlearn", "state", "--tasks", "1", "--factory", "train:make_strategy", "--record", "bad.json"]
BAD_PART = [*PART, "bad.json", "--samples"]
REFUSED = [
    ([*PART, "bad.json", "--benchmark", "train:digits"], "--task TASK with --samples, --classes or both"),
    ([*BAD_PART, "1"], "--task needs --benchmark MODULE:NAME"),
    ([*BAD_PART, "1", "--benchmark", "train:torch"], "no benchmark"),
    ([*BAD_PART, "999", "--benchmark", "train:digits"], "has 80 samples"),
    ([*BAD_PART, "1", "--tasks", "1", "--benchmark", "train:digits"], "unlearn needs one of"),
    ([*TASK, "--tasks", "7"], "task 7"),
    ([*TASK, "--factory", "train"], "MODULE:NAME"),
    ([*TASK, "--factory", "train:missing"], "missing"),
    ([*TASK, "--factory", "absent:make"], "No module named"),
    ([*TASK, "--out", "."], "no part of a state"),
    ([*TASK, "--sign", "absent.pem"], "--sign absent.pem: there is no such file; give a PEM file"),
    ([*TASK, "--sign", "train.py"], "the private key can't be read: give the 32 raw bytes of an Ed25519PrivateKey"),
    ([*TASK, "--tasks", "x"], "amnesia: --tasks must be int, got 'x'\n"),
    ([*TASK, "--factory", "train:Adam"], "--factory train:Adam must be a function without arguments"),
    ([*TASK, "--factory", "train:broken"], "--factory train:broken raised OSError: no data"),
    (["unlearn", "train.py", *TASK[2:]], "no state"),
    (["verify", "state"], "state is a folder: give the JSON file of an unlearning's record"),
    (["unlearn", "state", "--tasks", "1"], "unlearn needs --factory, --record; amnesia unlearn --help explains\n"),
    (["unlearn"], "amnesia: amnesia unlearn needs state, --factory, --record; amnesia unlearn --help explains\n"),
]


def test_wrong_requests_are_refused_and_change_nothing(run_folder, capsys):
    before = {file.name: file.read_bytes() for file in (run_folder / "state").iterdir()}
    for words, message in REFUSED:
        assert main(words) == 2, words
        assert message in capsys.readouterr().err
        assert not os.path.exists("bad.json")
    assert {file.name: file.read_bytes() for file in (run_folder / "state").iterdir()} == before
