"""Commands that unlearn, sign and verify a saved state in another process, and that plan and prune a store."""

import json
import os
import shutil
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.forked import run_script
from support.strategies import DIGITS, brief, learn

from avalanche_amnesia import References, training, with_unlearning
from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.runs.run_plan import plan_paths, reference_paths
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


UNLEARN = ["unlearn", "state", "--tasks", "1", "--factory", "train:make_strategy", "--record"]


def test_a_state_is_unlearned_and_verified(run_folder, amnesia):
    printed = amnesia(*UNLEARN, "r.json", "--out", "after")
    assert printed.startswith("Task 1: removed from after.\n")
    assert "state is unchanged and still contains all of it: delete it.\n" in printed
    assert "Unlearned task 1 (after 3 trainings)" in printed
    assert UnlearningRecord.load("r.json").remaining == (0, 2)
    for state, as_left in (("after", True), ("state", False)):
        words, status = ["verify", "r.json", "--state", state], int(not as_left)
        assert ("parts differ" in amnesia(*words, status=status)) is not as_left
        found = json.loads(amnesia(*words, "--json", status=status))
        assert (found["signed"], found["state_as_left"]) == (None, as_left)
        assert ("heads.1.weight" in found["differ"]) is not as_left


def test_a_killed_command_leaves_its_record_when_it_is_given_again(run_folder, amnesia):
    shutil.copytree(run_folder / "state", run_folder / "killed")
    words = ["unlearn", "killed", *UNLEARN[2:], "killed.json"]
    amnesia(*words)
    record = (run_folder / "killed.json").read_text()
    assert "--record killed.json exists" in amnesia(*words, status=2)
    os.unlink("killed.json")
    amnesia(*words)
    assert (run_folder / "killed.json").read_text() == record
    (run_folder / "killed.json").write_text(json.dumps(json.loads(record) | {"n_trained": 7}))
    assert "its last record" in amnesia("verify", "killed.json", "--state", "killed", status=1)


def test_a_state_that_another_command_has_changed_meanwhile_is_not_replaced(run_folder, amnesia, monkeypatch):
    shutil.copytree(run_folder / "state", run_folder / "shared")
    load = training.load_state

    def load_while_another_unlearns(strategy, state, key):
        load(strategy, state, key)
        monkeypatch.undo()
        monkeypatch.chdir(run_folder)
        amnesia("unlearn", "shared", "--tasks", "2", *UNLEARN[4:], "other.json")

    monkeypatch.setattr(training, "load_state", load_while_another_unlearns)
    assert "has changed shared since it was read" in amnesia("unlearn", "shared", *UNLEARN[2:], "mine.json", status=2)
    assert not os.path.exists("mine.json")
    amnesia("verify", "other.json", "--state", "shared")


def test_a_state_that_still_has_updates_and_no_record_of_the_unlearning_differs(run_folder, amnesia):
    amnesia(*UNLEARN, "mixed.json", "--out", "after")
    (new, parts), (old, old_parts) = read_state(run_folder / "after"), read_state(run_folder / "state")
    tensors = {**old_parts["state"], **parts["state"]}
    mixed = {**old_parts, **{name: part for name, part in parts.items() if name.startswith("model")}}
    write_state(run_folder / "mixed", new | {"plugins": old["plugins"]}, mixed | {"state": Part(tensors)})
    assert "the update of task 1, its last record" in amnesia("verify", "mixed.json", "--state", "mixed", status=1)


def test_a_record_is_signed_and_its_signature_checked(run_folder, amnesia):
    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (run_folder / "key.pem").write_bytes(private)
    (run_folder / "public.pem").write_bytes(public)
    amnesia(*UNLEARN, "signed.json", "--out", "signed", "--sign", "key.pem")
    checked = ["verify", "signed.json", "--public-key", "public.pem", "--state"]
    amnesia(*checked, "signed")
    further = ["--tasks", "2", "--factory", "train:make_strategy", "--record", "2.json", "--public-key", "public.pem"]
    assert "signed is signed, and would not be any more" in amnesia("unlearn", "signed", *further, status=2)
    amnesia("unlearn", "signed", *further, "--out", "unsigned")
    for state in ("state", "unsigned"):
        assert "it is not signed" in amnesia(*checked, state, status=2)
    assert "it is not signed" in amnesia("unlearn", "state", *further, status=2)
    forged = (run_folder / "signed.json").read_text().replace('"approximate"', '"exact"')
    (run_folder / "forged.json").write_text(forged)
    assert "signature" in amnesia("verify", "forged.json", "--public-key", "public.pem", status=2)


PART = ["unlearn", "disjoint", "--task", "1", "--factory", "train:make_disjoint", "--record"]


def test_samples_and_classes_of_a_task_are_unlearned(run_folder, amnesia):
    asked = ["--samples", "0", "7", "--classes", "1", "--benchmark", "train:digits", "--out", "rest"]
    printed = " ".join(amnesia(*PART, "part.json", *asked).split())
    record = UnlearningRecord.load("part.json")
    assert (record.task, record.plan.classes, record.claim, record.remaining) == (1, (1,), "exact", (0, 1, 2))
    assert f"{len(record.plan.samples)} samples of task 1 (all of classes 1): removed from rest." in printed
    assert "It equals, bit for bit, a state that never had any of it" in printed
    amnesia("verify", "part.json", "--state", "rest")


OWN = ["own", "--factory", "train:make_own", "--record", "own.json"]


PROVE = ["prove", *OWN, "--benchmark", "train:digits"]


def test_a_conditional_record_is_proved_in_another_process_until_its_code_is_edited(run_folder, amnesia):
    amnesia("unlearn", *OWN, "--tasks", "1")
    assert UnlearningRecord.load("own.json").claim == "conditional"
    amnesia(*PROVE, "--tasks", "2", "--store", "kept")
    record = UnlearningRecord.load("own.json")
    assert (record.claim, record.proof.tasks) == ("conditional", (2,))
    (run_folder / "prove.py").write_text(f"from avalanche_amnesia.lab.command_line import main\nmain({PROVE})\n")
    run_script(run_folder / "prove.py")  # this process has trained the task in other tests
    record = UnlearningRecord.load("own.json")
    assert (record.claim, record.proved, record.proof.apart) == ("exact", True, True)
    amnesia("verify", "own.json", "--state", "own")
    script = run_folder / "train.py"
    script.write_text(SCRIPT.replace("GAIN = 1.0", "GAIN = 1.01"))
    sys.modules.pop("train")
    printed = " ".join(amnesia(*PROVE, status=1).split())
    record = UnlearningRecord.load("own.json")
    script.write_text(SCRIPT)
    assert (record.claim, record.proof) == ("approximate", None)
    told = "task 0, trained again without the unlearned data, has other bits, first in heads.0.bias."
    assert printed.startswith(told)
    assert "this record is approximate (task 0, trained again" in amnesia(*PROVE, status=2)


def test_a_module_that_trains_again_when_it_is_imported_is_refused(run_folder, amnesia):
    shutil.copytree(run_folder / "state", run_folder / "trained_again")
    at_import = SCRIPT.replace('if __name__ == "__main__"', "if True").replace('"state"', '"trained_again"')
    (run_folder / "careless.py").write_text(at_import.replace("train_stream[:3]", "train_stream[:2]"))
    words = ["unlearn", "trained_again", "--tasks", "1", "--factory", "careless:make_strategy", "--record", "bad.json"]
    message = "importing careless:make_strategy changed trained_again: put what it trains under if __name__"
    assert message in amnesia(*words, status=2)


TASK = [*UNLEARN, "bad.json"]
BAD_PART = [*PART, "bad.json", "--samples"]
REFUSED = [
    ([*PART, "bad.json", "--benchmark", "train:digits"], "--task TASK with --samples, --classes or both"),
    ([*BAD_PART, "1"], "its data is needed (in a shell, --benchmark)"),
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
    ([*TASK, "--tasks", "x"], "amnesia: argument --tasks: invalid int value: 'x'\n"),
    ([*TASK, "--factory", "train:Adam"], "--factory train:Adam must be a function without arguments"),
    ([*TASK, "--factory", "train:broken"], "--factory train:broken raised OSError: no data"),
    (["unlearn", "train.py", *TASK[2:]], "no state"),
    (["verify", "state"], "state is a folder: give the JSON file of an unlearning's record"),
    (["unlearn", "state", "--tasks", "1"], "unlearn needs --factory, --record; amnesia unlearn --help explains\n"),
    (["unlearn"], "amnesia: amnesia unlearn needs state, --factory, --record; amnesia unlearn --help explains\n"),
]


def test_wrong_requests_are_refused_and_change_nothing(run_folder, amnesia):
    before = {file.name: file.read_bytes() for file in (run_folder / "state").iterdir()}
    for words, message in REFUSED:
        assert message in amnesia(*words, status=2)
        assert not os.path.exists("bad.json")
    assert {file.name: file.read_bytes() for file in (run_folder / "state").iterdir()} == before


BENCHMARK = with_unlearning(DIGITS, {1: [0], 2: [2], 3: [1]})


def test_a_plan_leaves_out_stored_states_and_its_count_is_right(tmp_path):
    store = RunStore(tmp_path)

    def plan():
        return plan_paths(reference_paths(brief, BENCHMARK, store, ("full", "same")), store, further=5)

    # beside the main run's 5 tasks: full runs without a request, in which nothing is shared; references: 1; 1; 3; 3, 4
    assert (plan().trainings, plan().stored, plan().to_compute, plan().seconds) == (5 + 14 + 4, 0, 5 + 5 + 3, None)
    references = References(brief, BENCHMARK, store=store)
    references.reference([1])
    assert plan().stored == 1
    assert plan().seconds > 0
    assert "1 are in the store" in str(plan())
    to_compute = plan().to_compute
    references.full(5)
    references.reference([3, 4])
    assert references.trainings - 1 == to_compute - 5
    assert plan().to_compute == 5


def test_the_command_prune_deletes_states(tmp_path, amnesia):
    store = RunStore(tmp_path)
    learn(store.run(brief()), DIGITS.train_stream[:2])
    assert "0 of 2 states deleted" in amnesia("prune", str(tmp_path), "--keep", "1G")
    assert "1 of 2 states deleted" in amnesia("prune", str(tmp_path), "--task", "1")
    assert "1 of 1 states deleted" in amnesia("prune", str(tmp_path), "--keep", "0")
    assert store.nodes() == []


def test_a_folder_that_is_no_store_is_refused(tmp_path, amnesia):
    amnesia("prune", str(tmp_path / "absent"), "--keep", "0", status=2)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in amnesia("prune", str(tmp_path), "--keep", "0", status=2)
    for size in ("much", "-3"):
        assert f"--keep {size!r} is no size" in amnesia("prune", str(tmp_path), "--keep", size, status=2)
    assert "one of --keep SIZE and --task TASK" in amnesia("prune", str(tmp_path), status=2)
