"""Sweeps run every cell once with shared references; their tables and commands."""

import csv
import json
import os
import re
import signal
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from support.forked import forked
from support.forked_interpreters import forked_interpreters
from support.tiny_study import TINY, AtOnce

from avalanche_amnesia import __version__
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.lab.executors import ProcessExecutor
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.report.measures import MEANINGS, MEASURES
from avalanche_amnesia.lab.report.page import report_page
from avalanche_amnesia.lab.report.reading import Evaluation, Run
from avalanche_amnesia.lab.report.verdicts import verdict_of
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.study.experiment import cells_of, folder_of, is_done, read_experiment
from avalanche_amnesia.lab.study.settings import MethodSettings, ScenarioSettings
from avalanche_amnesia.lab.study.sweep import jobs_of, plan_sweep, run_cell, sweep, train_references
from avalanche_amnesia.lab.study.tables import as_markdown, read_study, write_tables

CELLS = [*cells_of(TINY, ["AmnesiacHAT"], ["newest"], [2]), *cells_of(TINY, ["HAT"])]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Folder of a whole sweep, its plan, and its reports."""
    folder = tmp_path_factory.mktemp("sweep")
    plan, told = plan_sweep(CELLS, RunStore(folder / "store")), []
    listen = {"on_done": lambda job, result, n_left: told.append(result)}
    assert sweep(CELLS, AtOnce(), folder / "out", folder / "store", **listen) == {}
    return folder, plan, told


def results(folder):
    """Return the results of a run without its times."""
    records = [record | {"seconds": None, "time": None} for record in read_run(folder).records]
    return (folder / "results.csv").read_bytes(), records


def test_every_run_has_its_results_and_its_settings(swept):
    folder, _, _ = swept
    for cell in CELLS:
        place = folder_of(cell, folder / "out")
        assert is_done(cell, place)
        saved = yaml.safe_load((place / "settings.yaml").read_text())
        assert saved["method"] == {"name": cell.method, **asdict(TINY.methods[cell.method])}
        assert (saved["seed"], saved["training"]) == (cell.seed, asdict(TINY.training))
        last = read_run(place).last
        assert sorted(last.unlearned) == {"published": [0, 1, 4], "newest": [1, 3]}[cell.scenario]
        assert last.by_task("Accuracy_full").keys() == last.accuracy.keys()


def test_references_are_trained_as_planned_and_shared_by_scenarios(swept):
    folder, plan, told = swept
    trained = sum(result for result in told if isinstance(result, int))
    assert trained == plan.to_compute - 5 * len(CELLS)
    assert plan.trainings > plan.to_compute  # scenarios share references
    steps = RunStore(folder / "store").nodes()
    assert len(steps) == trained  # and the runs themselves trained no reference
    again = plan_sweep(CELLS, RunStore(folder / "store"))
    assert (again.to_compute, again.stored) == (5 * len(CELLS), trained)


def test_a_single_run_gives_the_same_bytes_as_the_sweep(swept, tmp_path):
    cell = CELLS[1]
    with warnings.catch_warnings(record=True) as seen:
        run_cell(cell, tmp_path)
    assert [str(w.message) for w in seen if w.category is DeprecationWarning] == []  # Avalanche's are hidden
    assert results(tmp_path) == results(folder_of(cell, swept[0] / "out"))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_job_is_deterministic_and_restores_torchs_settings(gpu, monkeypatch, tmp_path):
    def of_torch():
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def no_cells():
        inside.append(of_torch())
        yield from ()

    inside = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train_references(no_cells(), (), tmp_path)
        assert (inside, of_torch()) == ([(1, gpu)], (2, False))
    finally:
        torch.set_num_threads(threads)


def test_finished_runs_are_not_repeated_and_changed_ones_are(swept):
    folder, _, _ = swept
    assert jobs_of(CELLS, folder / "out", folder / "store") == []
    longer = replace(TINY, training=replace(TINY.training, epochs=2))
    assert len(jobs_of(cells_of(longer, ["HAT"], seeds=[1]), folder / "out", folder / "store")) == 3
    (place,) = (folder_of(cell, folder / "out") for cell in cells_of(TINY, ["HAT"], ["newest"], [2]))
    kept = results(place)
    (place / "run.jsonl").unlink()
    jobs = jobs_of(CELLS, folder / "out", folder / "store")
    assert [job.name for job in jobs] == ["HAT, seed 2: references (same, full)", "HAT, seed 2: newest"]
    assert jobs[1].needs == {jobs[0].name}
    executor, told = AtOnce(), []
    sweep(CELLS, executor, folder / "out", folder / "store", on_done=lambda job, result, n_left: told.append(result))
    assert told[0] == 0  # all references were there
    assert results(place) == kept


def in_a_session_of_its_own(words, said):
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    with forked_interpreters():
        sys.exit(main(words))


@pytest.mark.slow
def test_a_sweep_in_processes_that_is_killed_continues_with_the_same_bytes(swept, file, monkeypatch):
    words = ["sweep", "tiny.yaml", "method=HAT", "seed=1"]
    process = forked(in_a_session_of_its_own, [*words, "--workers", "1"], file / "said")
    while not (there := list(file.glob("runs/tiny/**/settings.yaml"))):
        assert process.is_alive(), (file / "said").read_text()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    written = {path: path.stat().st_mtime_ns for path in there}
    monkeypatch.setattr(ProcessExecutor, "submit", lambda self, *job: AtOnce().submit(*job))
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in there} == written
    for cell in cells_of(TINY, ["HAT"], seeds=[1]):
        assert results(folder_of(cell, file / "runs")) == results(folder_of(cell, swept[0] / "out"))


def test_names_are_escaped_in_tables():
    stream = {"name": "x", "n_tasks": 1, "n_train": None, "options": {}}
    settings = {"stream": stream, "network": {"name": "x"}, "training": {"epochs": 1, "batch_size": 1}}
    settings |= {"experiment": "x", "scenario": {"name": "newest"}}
    run = Run(Path("x"), "A | B\nC", settings, 1, {}, [Evaluation(0, (0,), (), (), None, {})])
    assert "| A \\| B C | 1 |" in as_markdown([run])


def test_tables_have_the_numbers_of_the_runs(swept, tmp_path, amnesia):
    folder, _, _ = swept
    assert "results.md" in amnesia("report", str(folder / "out"), "--tables", str(tmp_path / "tables"))
    with (tmp_path / "tables" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(CELLS)
    row = next(r for r in rows if (r["method"], r["scenario"], r["seed"]) == ("AmnesiacHAT", "newest", "2"))
    (cell,) = cells_of(TINY, ["AmnesiacHAT"], ["newest"], [2])
    end = read_run(folder_of(cell, folder / "out")).last
    mean = sum(end.accuracy.values()) / len(end.accuracy)
    assert float(row["remaining"]) == mean
    assert float(row["jsd"]) == end.number("JSD_own")
    assert (row["ratio"], row["claim"]) == ("", end.claim)  # no floor was measured
    runs = json.loads((tmp_path / "tables" / "tiny_seed2.json").read_text())
    names = [(run["settings"]["method"]["name"], run["settings"]["scenario"]["name"]) for run in runs]
    mine = runs[names.index(("AmnesiacHAT", "newest"))]
    assert [after["task"] for after in mine["after"]] == [0, 1, 2, 3, 4]
    assert mine["after"][-1]["accuracy"] == {str(task): value for task, value in end.accuracy.items()}
    assert mine["after"][-1]["measures"]["remaining"] == mean
    assert mine["after"][-1].keys() == {"task", "remaining", "unlearned", "accuracy", "measures"}
    text = (tmp_path / "tables" / "results.md").read_text()
    mine = [r for r in read_study(folder) if (r.name, r.settings["scenario"]["name"]) == ("HAT", "newest")]
    accuracies = [100 * MEASURES["remaining"].get(r.last) for r in mine]
    spread = abs(accuracies[0] - accuracies[1]) / 2**0.5
    assert f"| HAT | 1, 2 | – | {sum(accuracies) / 2:.1f} ± {spread:.1f} |" in text
    overview = text.split("## All scenarios: remaining\n")[1].split("\n## ")[0]
    assert f"{sum(accuracies) / 2:.1f} ± {spread:.1f}" in overview
    assert all(meaning in text for meaning in MEANINGS.values())
    assert min(Image.open(tmp_path / "tables" / "tiny.png").size) > 100
    first, second, *_ = read_study(folder)
    with pytest.raises(ValueError, match=r"runs of tiny differ in versions.torch: report them apart"):
        write_tables([first, replace(second, versions={**second.versions, "torch": "1.0"})], tmp_path / "mixed")


def test_samples_are_unlearned_by_the_methods_that_support_it(tmp_path):
    requests = {2: {"task": 1, "samples": [0, 3]}, 4: [0]}
    methods = {"weights": MethodSettings("DisjointSubnets"), "units": MethodSettings("AmnesiacHAT")}
    methods |= {"own": MethodSettings("experiments.piggyback:Piggyback"), "EWC": MethodSettings("EWC")}
    asking = {"person": ScenarioSettings("listed", {"requests": requests})}
    study = replace(TINY, methods=methods, scenarios=asking)
    cells = cells_of(study, seeds=[1])
    assert [cell.method for cell in cells] == ["weights", "own"]
    with pytest.raises(ValueError, match="can only be unlearned by DisjointSubnets, Independent, RanPAC"):
        cells_of(study, ["EWC"])
    with pytest.raises(ValueError, match=r"Piggyback.* can't train task 1 again"):
        run_cell(cells[1], tmp_path)
    run = run_cell(cells[0], tmp_path)
    assert is_done(cells[0], tmp_path)
    assert run.last.parts == ("2 samples of task 1",)
    assert [moment.parts_now for moment in run.moments] == [(), (), ("2 samples of task 1",), (), ()]
    assert (run.last.remaining, run.last.unlearned, run.last.claim) == ((1, 2, 3, 4), (0,), "exact, proved")
    for metric in ("ForgottenSamples_accuracy", "ForgottenSamples_membership"):
        assert run.last.by_task(metric) == run.last.by_task(f"{metric}_reference")
        assert run.last.by_task(metric).keys() == {1}
    assert "task 0 of 5 (2 samples of task 1 after task 2; task 0 after task 4)" in report_page([run])
    told = verdict_of([run])
    assert str(told) == "exact, proved"
    findings = {outcome.test.check: outcome.finding for outcome in told.outcomes}
    assert findings["forgotten samples"] == findings["membership of forgotten samples"] == "weak"  # a single task
    assert {line.partition(",")[0] for line in (tmp_path / "results.csv").read_text().splitlines()[1:]} == {"weights"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """An experiment's file in the working directory."""
    monkeypatch.chdir(tmp_path)
    content = asdict(TINY) | {"profiles": {"short": {"seeds": [5], "stream": {"n_tasks": 2, "n_train": 60}}}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path


def test_run_takes_overrides_and_a_profile(file, amnesia):
    words = ["run", "tiny.yaml", "method=HAT", "scenario=newest", "training.batch_size=10", "--profile", "short"]
    place = file / "runs" / "tiny" / "HAT" / "newest" / "seed5"
    assert str(place.relative_to(file)) in amnesia(*words, "methods.HAT.lr=0.01")
    saved = yaml.safe_load((place / "settings.yaml").read_text())
    assert (saved["stream"]["n_train"], saved["training"]["batch_size"], saved["method"]["lr"]) == (60, 10, 0.01)
    assert "there already" in amnesia(*words, "methods.HAT.lr=0.01")
    log = (place / "run.jsonl").read_text()
    (place / "run.jsonl").write_text(log[: log.rindex("{")])  # a damaged run is repeated
    with pytest.warns(UserWarning, match="did not end and are left out"), pytest.raises(ValueError, match="no results"):
        read_study(file)
    assert "settings or files: files.run.jsonl\n" in amnesia(*words, "methods.HAT.lr=0.01")
    assert "which has other settings or files: method.lr" in amnesia(*words, "methods.HAT.lr=0.02")


def test_plan_and_sweep_of_a_part_of_an_experiment(file, amnesia, monkeypatch):
    monkeypatch.setattr("avalanche_amnesia.lab.executors.ProcessExecutor", lambda workers, gpus: AtOnce())
    words = ["tiny.yaml", "method=[HAT]", "scenario=[newest]", "seed=[1]"]
    told = amnesia("plan", *words)
    assert told.startswith("tiny: 1 runs, 0 done already; their references come first\n")
    assert "of 25 trainings are left to do; how long they take" in told
    told = amnesia("sweep", *words)
    assert re.search(r"\[1/2\] HAT, seed 1: references \(same, full\): \d+ trainings\n", told)
    assert re.search(r"\[2/2\] HAT, seed 1: newest: accuracy .+, (undecided: .+|trace found)\n", told)
    assert "1 runs, 1 done already" in amnesia("sweep", *words)
    assert "failed: DivergedError" in amnesia("sweep", *words, "methods.HAT.lr=1e30", status=1)
    assert amnesia("sweep", *words, "network.widths=[]", status=2).startswith("amnesia: network.widths must have one")


def test_a_missing_gpu_is_refused_unless_the_workers_of_a_cluster_have_it(file, amnesia, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("run", "sweep"):
        told = amnesia(command, "tiny.yaml", "training.device=cuda", status=2)
        assert "training.device=cuda: torch finds no GPU here" in told
    asked = []

    def cluster(address, gpus):
        asked.append((address, gpus))
        raise ConnectionError("no cluster here")

    monkeypatch.setattr("avalanche_amnesia.lab.executors.clusters.RayExecutor", cluster)
    words = ["sweep", "tiny.yaml", "training.device=cuda", "--executor", "ray", "--address", "auto", "--gpus", "0.5"]
    amnesia(*words, status=2)
    assert asked == [("auto", 0.5)]


REFUSED = [
    ("- a", "holds no settings"),
    ("a: [", "odd.yaml is no YAML (expected the node content, but found '<stream end>', line 1)"),
    ("a: \0", "odd.yaml is no YAML (no text)"),
    ("extends: 5", "odd.yaml: extends must be a list, got 5"),
    ("name: x\nseeds: [1]\nseeds: [2]", "odd.yaml is no YAML (two keys seeds, line 3)"),
    ("name: x\nmethods: {A B: {kind: HAT}, A-B: {kind: HAT}}", "['A B', 'A-B'] can't name folders"),
    (f"name: x\nmethods: {{{'A' * 201}: {{kind: HAT}}}}", "at most 200"),
    ("extends: tiny.yaml\nprofiles: 5", "odd.yaml: profiles must be a mapping, got 5"),
    ("name: x\nmethods: {A: {kin: HAT}}", "did you mean 'kind'?"),
    ("extends: tiny.yaml\ntraining: {epoch: 2}", "training has no epoch; did you mean 'epochs'?"),
    ("extends: tiny.yaml\ntrainin: {epochs: 2}", "Experiment has no trainin; did you mean 'training'?"),
    ("extends: tiny.yaml\nseeds: 1", "seeds must be a list, got 1"),
    ("extends: tiny.yaml\nseeds: [1, two]", "seeds[1] must be int, got 'two'"),
    ("seeds: [1]", "odd.yaml: Experiment lacks name, methods; it needs name, methods"),
    ("extends: odd.yaml", "odd.yaml extends itself"),
    ("extends: tinny.yaml", "did you mean 'tiny.yaml'?"),
]


def test_files_that_are_no_experiments_are_refused(file, amnesia):
    for content, words in REFUSED:
        (file / "odd.yaml").write_text(content)
        assert words in amnesia("run", "odd.yaml", status=2)
    (file / "unmounted").symlink_to("absent")
    assert "unmounted is a file" in amnesia("run", "tiny.yaml", "--out", "unmounted", status=2)
    for command, words in ((["sweep"], "amnesia sweep needs file"), (["run", "none.yaml"], "none.yaml")):
        assert words in amnesia(*command, status=2)


def test_a_file_extends_other_files_and_changes_them(file):
    (file / "parts").mkdir()
    (file / "parts" / "more.yaml").write_text("methods: {WSN: {kind: WSN, lr: 0.1}}\nprofiles: {long: {seeds: [7, 8]}}")
    (file / "own.yaml").write_text(
        "name: own\nextends: [tiny.yaml, parts/more.yaml]\nmethods: {HAT: null, WSN: {lr: 0.2}}\nseeds: [4]"
    )
    found, tiny = read_experiment(file / "own.yaml"), read_experiment(file / "tiny.yaml")
    assert found.methods == {"AmnesiacHAT": tiny.methods["AmnesiacHAT"], "WSN": MethodSettings("WSN", lr=0.2)}
    assert (found.name, found.seeds, found.stream) == ("own", [4], tiny.stream)
    assert read_experiment(file / "own.yaml", "long").seeds == [7, 8]
    assert read_experiment(file / "own.yaml", "short").seeds == [5]


def test_a_method_that_keeps_a_task_does_not_learn_it_again():
    again = replace(TINY, scenarios={"again": ScenarioSettings("relearn")})
    assert {cell.method for cell in cells_of(again)} == {"AmnesiacHAT"}
    with pytest.raises(ValueError, match="obeys no request"):
        cells_of(again, ["HAT"], ["again"])


def test_version_help_and_completion_are_printed(capsys):
    for words, printed in (
        (["--version"], __version__),
        (["run", "--help"], "usage: amnesia run FILE [key=value ...]"),
        (["run", "--help"], "passes over each task's training images (type: int, at least 1, default: 2)"),
        (["sweep", "--help"], "GPUs of a job"),
        (["--print_completion", "bash"], "training.batch_size"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code in (0, None)
        assert printed in " ".join(capsys.readouterr().out.split())


def test_data_sets_are_listed_and_downloaded_by_torchvision(tmp_path, data_root, amnesia, monkeypatch):
    lines = amnesia("data", "--data-root", str(data_root)).splitlines()
    states = {line.split()[0]: line.split()[1] for line in lines[1:]}
    assert states["digits"] == states["MNIST"] == "there"
    assert states["CIFAR100"] == "--download"
    asked = []
    monkeypatch.setattr("torchvision.datasets.CIFAR100", lambda root, download: asked.append((root, download)))
    monkeypatch.setattr("avalanche_amnesia.contrib.streams.image_sets.absent_files", lambda name, root: [name])
    amnesia("data", "--data-root", str(tmp_path / "new"), "--download", "CIFAR100")
    assert asked == [(str(tmp_path / "new"), True)]
    monkeypatch.delenv("AMNESIA_DATA", raising=False)
    assert "no data root" in amnesia("data")
    (tmp_path / "mnist.yaml").write_text(json.dumps(asdict(TINY) | {"stream": {"name": "SplitMNIST"}}))
    for command in ("run", "plan", "sweep"):
        words = [command, str(tmp_path / "mnist.yaml"), "--out", str(tmp_path / "a"), "--store", str(tmp_path / "b")]
        assert "SplitMNIST needs a data root: --data-root FOLDER" in amnesia(*words, status=2)
    for words, told in (
        (["--download", "CIFAR1000"], "did you mean 'CIFAR100'?"),
        (["--download", "MNIST"], "needs a data root"),
        (["--data-root", str(tmp_path), "--download", "CIFAR10-JPEG"], "--download[0] must be one of 'CIFAR10'"),
    ):
        assert told in amnesia("data", *words, status=2)
