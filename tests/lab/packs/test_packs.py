"""Packs: what others get without training is what the runs had, to the bit; whatever else somebody sends is refused."""

import hashlib
import json
import os
import shutil
import signal
import zipfile
from dataclasses import replace

import pytest
import torch
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.forked import forked
from support.tiny_study import TINY

from avalanche_amnesia.audit import SigningError
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.evaluation import References, jsd_metrics
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.lab.packs import StatePack, export_states, writing
from avalanche_amnesia.lab.packs.index import HEAD
from avalanche_amnesia.lab.report import read_run, read_runs
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.study import MethodSettings, ScenarioSettings, StreamSettings
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.experiment import cells_of, folder_of
from avalanche_amnesia.lab.study.sweep import run_cell
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import sealed
from avalanche_amnesia.training import remaining_experiences

POOLS = MethodSettings("DisjointSubnets", lr=4e-3, options={"isolation": "planned"})
REQUESTS = {"in turn": {1: [0], 2: [1]}, "a person": {1: {"task": 0, "samples": [0, 7]}}}
STUDY = replace(
    TINY,
    methods={"AmnesiacHAT": MethodSettings("AmnesiacHAT"), "pools": POOLS},
    scenarios={name: ScenarioSettings("listed", {"requests": requests}) for name, requests in REQUESTS.items()},
    stream=StreamSettings("PermutedDigits", 3, n_train=100, n_test=50),
)
CELLS = [
    *cells_of(STUDY, ["AmnesiacHAT"], ["in turn"]),
    *cells_of(STUDY, ["pools"], ["a person"], [1]),
]
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Folder with three runs in ``out``, their store, and packs: a file, a folder, and a signed one with everything."""
    folder = tmp_path_factory.mktemp("study")
    for cell in CELLS:
        run_cell(cell, folder_of(cell, folder / "out"), folder / "store")
    store = RunStore(folder / "store")
    export_states([folder / "out"], folder / "pack.zip", store)
    export_states([folder / "out"], folder / "pack", store)
    export_states([folder / "out"], folder / "all.zip", store, everything=True, key=KEY)
    return folder


@pytest.fixture(scope="module")
def pem(study):
    encoding, public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    files = study / "public.pem", study / "others.pem"
    for file, key in zip(files, (KEY, Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))), strict=True):
        file.write_bytes(key.public_key().public_bytes(encoding, public))
    return files


def hashes(model):
    return state_hashes(model.state_dict())


@pytest.mark.parametrize("name", ["pack.zip", "pack"])
def test_what_a_pack_gives_is_what_the_run_had_to_the_bit(study, name):
    torch.set_num_threads(1)
    run = StatePack(study / name).run("AmnesiacHAT", seed=2)
    last = read_run(folder_of(CELLS[1], study / "out")).last
    assert (run.remaining, run.unlearned) == (last.remaining, last.unlearned)
    assert [record.tasks for record in run.records] == [(0,), (1,)]
    references = run.references()
    benchmark, make = build(CELLS[1])
    own = References(make, benchmark, store=RunStore(study / "store"))
    assert hashes(references.reference(run.remaining)) == hashes(own.reference(run.remaining))
    metrics = jsd_metrics(references, probes=("remaining", "none"), noise_floor=())
    strategy = run.strategy(evaluator=EvaluationPlugin(*metrics, loggers=[BaseLogger()]))
    assert hashes(strategy.model) == run.records[-1].after
    read = strategy.eval(remaining_experiences(strategy, run.benchmark.test_stream))
    for probe in ("JSD_remaining", "JSD_none"):
        assert read[f"{probe}/eval_phase/test_stream"] == last.number(probe)
    assert strategy.unlearn([run.remaining[0]]).remaining == run.remaining[1:]
    assert references.trainings == own.trainings == 0


def test_all_has_the_strategy_before_any_request_and_every_model(study):
    torch.set_num_threads(1)
    run = StatePack(study / "all.zip", public_key=KEY.public_key()).run("AmnesiacHAT", seed=1)
    references = run.references()
    metrics = jsd_metrics(references, probes=("own",), noise_floor=())
    strategy = run.strategy(before=True, evaluator=EvaluationPlugin(*metrics, loggers=[BaseLogger()]))
    assert hashes(strategy.model) == hashes(references.full(3))
    strategy.unlearn(run.unlearned, keep_probes=True)
    read = strategy.eval(remaining_experiences(strategy, run.benchmark.test_stream))
    assert 0 < read["JSD_own/eval_phase/test_stream"] < 1
    assert {each["variant"] for each in run.entry["references"]} == {"same"}
    assert len({tuple(each["tasks"]) for each in run.entry["references"]}) > 3
    assert references.trainings == 0
    with pytest.raises(StateError, match=r"AmnesiacHAT, in turn, seed 1: it was packed without .* --all"):
        StatePack(study / "pack.zip").run("AmnesiacHAT", seed=1).strategy(before=True)


def test_references_without_forgotten_samples_are_given_to_those_who_ask_for_them(study):
    run = StatePack(study / "pack.zip").run("pools")
    strategy, references = run.strategy(), run.references()
    # What forgets samples is known once they have gone; a request for samples alone leaves all tasks.
    assert run.remaining == (0, 1, 2)
    of_its_data = references.of(next(p for p in strategy.plugins if hasattr(p, "forgotten")))
    assert of_its_data is not references
    assert hashes(of_its_data.reference(run.remaining)) == hashes(strategy.model)  # which is what exact means
    assert of_its_data.trainings == references.trainings == 0
    with pytest.raises(StateError, match="without the strategy before any request"):  # that one would lack them, too
        StatePack(study / "all.zip").run("pools").strategy(before=True)


def test_the_same_runs_are_the_same_bytes_and_no_blob_is_there_twice(study, tmp_path):
    made = export_states([study / "out"], tmp_path / "again.zip", RunStore(study / "store"))
    assert (tmp_path / "again.zip").read_bytes() == (study / "pack.zip").read_bytes()
    assert (made.runs, made.nbytes) == (3, (tmp_path / "again.zip").stat().st_size)
    with zipfile.ZipFile(tmp_path / "again.zip") as archive:
        names = archive.namelist()
        assert len(names) == len(set(names)) == made.blobs + 1
        for name in names[1:]:
            assert hashlib.sha256(archive.read(name)).hexdigest() == name.removeprefix("blobs/")
            assert (study / "pack" / name).read_bytes() == archive.read(name)
        assert archive.read("index.json") == (study / "pack/index.json").read_bytes()


# Commands ------------------------------------------------------------------------------------------------------


def test_the_commands_pack_unpack_and_verify(study, pem, tmp_path, capsys):
    (tmp_path / "key.pem").write_bytes(
        KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    words = ["export-states", str(study / "out"), "--store", str(study / "store"), "--to", str(tmp_path / "p.zip")]
    assert main([*words, "--sign", str(tmp_path / "key.pem")]) == 0
    assert "p.zip: 3 run(s)" in capsys.readouterr().out
    unpacked, key = tmp_path / "theirs", ["--public-key", str(pem[0])]
    assert main(["unpack", str(tmp_path / "p.zip"), "--to", str(unpacked), *key]) == 0
    run = folder_of(CELLS[0], unpacked)
    assert (run / "run.jsonl").read_bytes() == (folder_of(CELLS[0], study / "out") / "run.jsonl").read_bytes()
    assert main(["verify", str(run / "records/2.json"), "--state", str(run / "end"), *key]) == 0
    assert main(["verify", str(run / "records/1.json"), "--state", str(run / "end"), *key]) == 1
    assert sorted(path.name for path in (run / "references").iterdir()) == ["same-2"]
    assert main(["unpack", str(tmp_path / "p.zip"), "--to", str(unpacked)]) == 2
    assert main(["unpack", str(tmp_path / "p.zip"), "--to", str(tmp_path / "no"), "--public-key", str(pem[1])]) == 2
    assert "the signature does not hold" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_what_is_not_in_the_store_is_refused_before_anything_is_written(study, tmp_path):
    place = folder_of(CELLS[0], study / "out")
    with pytest.raises(StateError, match=r"does not have how 1 of 1 runs ended, such as .*seed1: give the store"):
        export_states([place], tmp_path / "pack.zip", RunStore(tmp_path / "store"))
    shutil.copytree(study / "store", tmp_path / "pruned")
    store = RunStore(tmp_path / "pruned")
    store.prune(0, spare=[node.key for node in store.nodes() if node.step == "end of a run"])
    with pytest.raises(StateError, match=r"no longer has a model that .*seed1 was measured by"):
        export_states([place], tmp_path / "pack.zip", store)
    with pytest.raises(ValueError, match="are the same run: give each once"):
        export_states([place, place], tmp_path / "pack.zip", RunStore(study / "store"))
    with pytest.raises(ValueError, match="holds no results of amnesia run"):
        export_states([tmp_path], tmp_path / "pack.zip", store)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis holds \['thesis.tex'\], which are no part of a pack"):
        export_states([place], tmp_path / "thesis", RunStore(study / "store"))
    assert not (tmp_path / "pack.zip").exists()


def killed_after(n, folder, to):
    """Pack a run, and be killed when the ``n``-th file is written."""
    written = []

    def kill(function):
        def counted(*args, **options):
            written.append(args)
            if len(written) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    writing.replace_file = kill(writing.replace_file)
    zipfile.ZipFile.writestr = kill(zipfile.ZipFile.writestr)
    export_states([folder_of(CELLS[0], folder / "out")], to, RunStore(folder / "store"))


@pytest.mark.parametrize("name", ["pack.zip", "pack"])
def test_a_killed_export_leaves_the_pack_that_was_there(study, tmp_path, name):
    to = tmp_path / name
    for n, there in ((3, False), (10**6, True)):
        process = forked(killed_after, n, study, to)
        process.join(60)
        assert (process.exitcode == 0) == there
        if there:
            assert len(StatePack(to).runs) == 1
        else:
            with pytest.raises(StateError):
                StatePack(to)
    export_states([study / "out"], to, RunStore(study / "store"))
    assert [path.name for path in tmp_path.rglob("*.part")] == []
    process = forked(killed_after, 1, study, to)  # of a folder that is the index: its blobs are there
    process.join(60)
    assert process.exitcode != 0
    assert len(StatePack(to).runs) == 3


# Packs of anybody ----------------------------------------------------------------------------------------------


def resealed(study, to, change):
    """A pack whose index somebody changed, with a checksum that fits."""
    shutil.copytree(study / "pack", to)
    content = json.loads((to / "index.json").read_text())["content"]
    head = change(content) or HEAD
    (to / "index.json").write_text(sealed(content, **head))
    return to


def set_file(name, blob="0" * 64):
    def change(content):
        content["runs"][0]["files"][name] = blob

    return change


def renamed(**names):
    def change(content):
        for run in content["runs"]:
            run["settings"].update(names)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: HEAD | {"version": 2}, "has version 2, and this package reads version 1"),
        (lambda content: {"format": "a novel", "version": 1}, "has format a novel"),
        (set_file("../../evil.json"), r"schema of a pack at \$.content.runs\[0\].files"),
        (set_file("records/9.json"), "name blobs that it does not list"),
        (set_file("records/9.json", "../secret"), "schema of a pack"),
        (lambda content: content["blobs"].update({"../" * 20: 1}), "schema of a pack"),
        (lambda content: content["blobs"].update({"f" * 64: 1}), "cut short"),
        (lambda content: content["runs"][0].pop("end") and None, "'end' is a required property"),
        (lambda content: content["runs"][0].update(code="import os"), "'code' was unexpected"),
    ],
)
def test_an_index_that_is_none_is_refused(study, tmp_path, change, words):
    with pytest.raises(StateError, match=f"pack is no pack that can be read: .*{words}"):
        StatePack(resealed(study, tmp_path / "pack", change))


def test_damaged_and_foreign_packs_are_refused_in_words(study, tmp_path):
    whole = (study / "pack.zip").read_bytes()
    for content in (b"", b"PK", b"no pack at all", whole[: len(whole) // 2], whole[len(whole) // 2 :]):
        (tmp_path / "pack.zip").write_bytes(content)
        with pytest.raises(StateError, match=r"pack.zip is no pack that can be read"):
            StatePack(tmp_path / "pack.zip")
    with pytest.raises(StateError, match="there is no pack"):
        StatePack(tmp_path / "absent.zip")
    with pytest.raises(StateError, match=r"it has no index.json"):
        StatePack(study / "out")


def test_every_blob_is_looked_at_before_it_is_used(study, tmp_path):
    shutil.copytree(study / "pack", tmp_path / "pack")
    run = StatePack(tmp_path / "pack").run("AmnesiacHAT", seed=1)
    for files in (run.entry["end"], run.entry["references"][0]["model"], run.entry["files"]):
        file = tmp_path / "pack/blobs" / max(files.values())
        content = file.read_bytes()
        for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], content + b"\0"):
            file.write_bytes(changed)
            with pytest.raises(StateError, match="pack is damaged"):
                StatePack(tmp_path / "pack").unpack(tmp_path / "unpacked")
            assert not (tmp_path / "unpacked").exists()
        file.write_bytes(content)
    blob = tmp_path / "pack/blobs" / run.entry["end"]["state.json"]
    blob.write_bytes(blob.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(StateError, match="pack is damaged"):
        run.strategy()


def test_no_code_and_no_place_that_a_pack_names_is_used(study, tmp_path):
    for number, (place, value) in enumerate(
        (("method.kind", "os:system"), ("method.options", {"trajectory": {"path": str(tmp_path / "logs")}}))
    ):
        group, name = place.split(".")

        def change(content, group=group, name=name, value=value):
            content["runs"][0]["settings"][group][name] = value

        run = StatePack(resealed(study, tmp_path / f"pack{number}", change)).runs[0]
        for act in (run.strategy, run.references, lambda run=run: run.benchmark):
            with pytest.raises(StateError, match=f"method.{name}.* is code of somebody's own, or a place on a disk"):
                act()
    assert not (tmp_path / "logs").exists()
    names = resealed(study, tmp_path / "pack", renamed(experiment="../../.."))
    StatePack(names).unpack(tmp_path / "deep/unpacked")
    assert {path.name for path in tmp_path.iterdir()} == {"pack", "pack0", "pack1", "deep"}


def test_a_state_of_another_strategy_is_refused(study, tmp_path):
    def change(content):
        content["runs"][0]["end"] = content["runs"][2]["end"]

    run = StatePack(resealed(study, tmp_path / "pack", change)).runs[0]
    with pytest.raises(StateError, match=r"seed 1, end is the state of a .*DisjointSubnets"):
        run.strategy()


def test_a_run_is_named_until_there_is_one(study):
    pack = StatePack(study / "pack.zip")
    assert pack.run("AmnesiacHAT", seed=1, scenario="in turn").seed == 1
    with pytest.raises(ValueError, match=r"has 2 runs with .*AmnesiacHAT, in turn, seed 1, tiny"):
        pack.run("AmnesiacHAT")
    with pytest.raises(ValueError, match="has no run with"):
        pack.run("EWC")
    with pytest.raises(TypeError, match="did you mean 'seed'"):
        pack.run("AmnesiacHAT", sead=1)


# Rows of others ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packs(study):
    """A pack per seed of AmnesiacHAT; the second one is signed."""
    store, places = RunStore(study / "store"), [study / "seed1.zip", study / "seed2.zip"]
    for cell, to, key in zip(CELLS, places, (None, KEY), strict=False):
        export_states([folder_of(cell, study / "out")], to, store, key=key)
    return places


def test_one_page_joins_rows_of_several_sources_and_names_them(study, packs, pem, tmp_path, capsys):
    page, own = tmp_path / "page.html", folder_of(CELLS[2], study / "out")
    assert main(["report", *map(str, packs), str(own), "--out", str(page)]) == 0
    assert "3 run(s)" in capsys.readouterr().out
    html = page.read_text()
    assert "seeds 1 and 2" in html
    for told in (*map(str, packs), str(own), "signed, not checked", "not signed"):
        assert told in html
    assert main(["report", str(packs[0]), str(folder_of(CELLS[0], study / "out")), "--out", str(page)]) == 2
    error = capsys.readouterr().err
    assert "seed1.zip/tiny/AmnesiacHAT/in-turn/seed1 and" in error
    assert "give each run once" in error


def test_with_a_key_every_pack_is_signed(study, packs, pem, tmp_path, capsys):
    """A pack without a signature may hold anybody's logs beside records that the key signed."""
    page, own = tmp_path / "page.html", folder_of(CELLS[2], study / "out")
    words = ["report", str(packs[1]), str(own), "--out", str(page), "--public-key", str(pem[1]), str(pem[0])]
    assert main(words) == 0
    assert "signed by public.pem" in page.read_text()
    for refused in (
        words[:-1],
        ["report", str(packs[0]), *words[3:]],
        ["report", str(packs[1]), "--tables", str(tmp_path / "no"), "--public-key", str(pem[1])],
    ):
        capsys.readouterr()
        assert main(refused) == 2, refused
        assert "sign" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_changed_record_is_found_by_its_signature(packs, pem, tmp_path):
    StatePack(packs[1]).unpack(tmp_path / "theirs")
    file = folder_of(CELLS[1], tmp_path / "theirs") / "records/2.json"
    file.write_text(file.read_text().replace('"approximate"', '"exact"'))
    assert read_runs(tmp_path / "theirs")[0].signatures == ["signed, not checked"] * 2
    with pytest.raises(SigningError, match=r"records.2.json: changed after signing"):
        read_runs(tmp_path / "theirs", keys={"public.pem": pem[0].read_bytes()})


def test_tables_join_packs_folders_and_files_of_results(study, packs, tmp_path, capsys):
    together, own = tmp_path / "together", folder_of(CELLS[1], study / "out")
    assert main(["report", str(packs[0]), str(own), "--tables", str(together)]) == 0
    theirs = together / "tiny_seed1.json"
    assert main(["report", str(theirs), str(own), "--tables", str(tmp_path / "again")]) == 0
    for name in ("results.csv", "tiny_seed1.json", "tiny_seed2.json"):
        assert (tmp_path / "again" / name).read_bytes() == (together / name).read_bytes()
    assert f"From {theirs}: AmnesiacHAT; seeds 1." in (tmp_path / "again/results.md").read_text()
    assert main(["report", str(theirs), str(packs[0]), "--tables", str(tmp_path / "no")]) == 2
    assert "tiny, AmnesiacHAT, in turn, 1 is in" in capsys.readouterr().err
    longer = json.loads(theirs.read_text())
    longer[0]["settings"]["training"]["epochs"] = 7
    (tmp_path / "longer.json").write_text(json.dumps(longer))
    assert main(["report", str(tmp_path / "longer.json"), str(own), "--tables", str(tmp_path / "no")]) == 2
    assert "training.epochs=7, and in" in capsys.readouterr().err
    (tmp_path / "longer.json").write_text("[{}]")
    assert main(["report", str(tmp_path / "longer.json"), "--tables", str(tmp_path / "no")]) == 2
    assert "holds no results of a seed" in capsys.readouterr().err


def test_runs_of_another_study_say_so_in_their_names(study, tmp_path):
    from avalanche_amnesia.lab.report import entries

    first, _, pools = (read_run(folder_of(cell, study / "out")) for cell in CELLS)
    assert [entry.name for entry in entries([first, pools])] == ["AmnesiacHAT", "pools"]
    other = {**pools.settings, "training": {**pools.settings["training"], "epochs": 7}}
    found = [entry.name for entry in entries([first, replace(pools, settings=other)])]
    assert found == ["AmnesiacHAT (epochs 1)", "pools (epochs 7)"]
    unknown = replace(pools, settings={"seed": 1})
    assert [entry.name for entry in entries([first, unknown])] == ["AmnesiacHAT", "pools"]


def test_no_log_leads_out_of_its_folder(study, tmp_path):
    from avalanche_amnesia.lab.logging import JSONRunError

    shutil.copytree(folder_of(CELLS[0], study / "out"), tmp_path / "run")
    log = tmp_path / "run/run.jsonl"
    log.write_text(log.read_text().replace("records/1.json", "../../etc/passwd"))
    with pytest.raises(JSONRunError, match=r"'../../etc/passwd' is no place of a record"):
        read_run(tmp_path / "run")
