"""The demo: equal results for equal seeds, its files, and its errors."""

import re
from functools import partial
from importlib import import_module
from unittest import mock

import pytest
from support.wandb_files import read_offline_run

from avalanche_amnesia.lab import executors
from avalanche_amnesia.lab.logging.run_lines import lines_of
from avalanche_amnesia.lab.report.measures import MEASURES
from avalanche_amnesia.lab.report.page import report_page
from avalanche_amnesia.lab.report.reading import read_runs
from avalanche_amnesia.lab.report.tables import csv_of
from avalanche_amnesia.lab.report.verdicts import verdict_of
from avalanche_amnesia.lab.report.wording import without_unit
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.study import demo as module
from avalanche_amnesia.lab.study.demo import REQUESTS, run_demo


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Start no process, because importing Avalanche in it takes longer than these tests."""
    helper = mock.Mock(submit=lambda function, *arguments: function is import_module and function(*arguments))
    monkeypatch.setattr(executors, "ProcessExecutor", mock.Mock(return_value=helper))


FEWER_IMAGES = partial(module.settings.StreamSettings, n_train=200, n_test=100)
"""No function of this file: records would name it as a part that a training rests on."""
METHODS = {name: method for name, method in module.METHODS.items() if name != "LwF"}
"""All but one of the two stock strategies, which differ in nothing that the demo shows."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    printed = []
    store, trainings = tmp_path_factory.mktemp("store"), []
    helper = mock.Mock(submit=lambda function, *arguments: trainings.append(function(*arguments)))
    fewer_images = mock.patch.object(module.settings, "StreamSettings", FEWER_IMAGES)
    with fewer_images, mock.patch.object(module, "METHODS", METHODS):
        runs = run_demo(out, printed.append, helper, store, epochs=1)
    # All references are the helper's, but for one of task 0 with planned pools, needed before any unlearning.
    assert len(RunStore(store).nodes()) == sum(trainings) + 1 == 61
    return out, runs, "\n".join(printed)


FLOORS = ("", "_floor_order", "_floor_seed", "_tasks")


def test_logs_have_every_number_of_every_moment(demo):
    out, runs, _ = demo
    assert [run.name for run in runs] == ["Weight pools", "AmnesiacHAT", "EWC"]
    assert read_runs(out / "runs") == sorted(runs, key=lambda run: run.name)
    for run in runs:
        assert [moment.unlearned_now for moment in run.moments] == [tuple(REQUESTS.get(t, ())) for t in range(5)]
        assert (run.last.remaining, set(run.last.by_task("UnlearnedAccuracy"))) == ((2, 3), {0, 1, 4})
        jsd = {f"JSD_{probe}{floor}" for probe in ("own", "remaining", "none") for floor in FLOORS}
        assert jsd <= run.last.numbers.keys()
        assert [record["plan"]["tasks"] for record in run.records] == [(0,), (1, 4)]
        assert all(change["before"] != change["after"] for record in run.records for change in record["changes"])


def test_table_and_page_are_made_of_the_logs(demo):
    out, runs, _ = demo
    assert (out / "results.csv").read_bytes() == csv_of(runs)
    assert (out / "report.html").read_text() == report_page(runs)
    for run in runs:
        assert [cost.after for cost in run.costs] == [1, 4]
        assert all(cost.unlearn > 0 < cost.retrain for cost in run.costs)


def test_terminal_wandb_log_and_page_show_the_same_verdict_beside_figures(demo):
    out, runs, printed = demo
    page = (out / "report.html").read_text()
    offline = {run.name: run for run in map(read_offline_run, (out / "wandb").glob("offline-run-*"))}
    assert {run.group for run in offline.values()} == {"demo"}
    assert {"Figure/Masks", "Figure/Capacity"} <= {name for row in offline["AmnesiacHAT"].rows for name in row}
    words = {run.name: str(verdict_of([run])) for run in runs}
    assert words.keys() == offline.keys()
    assert words["Weight pools"] == "exact, proved"
    assert len(set(words.values())) > 1
    for name, verdict in words.items():
        assert f"{name:12}  {verdict}" in printed.splitlines()
        assert offline[name].summary["Verdict"] == verdict
        assert {"Verdict": verdict} in [line["texts"] for line in lines_of(out / "runs" / name) if "texts" in line]
        (row,) = re.findall(rf'<th scope="row">{name}</th>\n<td class="verdict.*?</span> (.*?)</strong>', page)
        assert row == verdict


def test_the_printed_table_has_the_numbers_of_the_logs(demo):
    out, runs, printed = demo
    lines = [line for line in printed.splitlines() if str(out) not in line]
    assert all(f"{run.name}: task {task}" in lines for run in runs for task in range(5))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    table = {title: values for title, *values in cells}
    assert table[""] == [run.name for run in runs]
    for measure in MEASURES.values():
        values = [measure.get(run.last) for run in runs]
        assert table[measure.title] == ["–" if v is None else without_unit(measure.words(v)) for v in values]
        assert f"{measure.title}: " in printed
    assert f"Open {out / 'report.html'}" in printed


def test_an_interrupted_demo_prints_one_line_and_writes_no_result(tmp_path, amnesia, monkeypatch):
    def interrupted(*args, **options):
        given_on.append(store in args)
        raise KeyboardInterrupt

    given_on, store = [], tmp_path / "store"
    monkeypatch.setattr(module, "run_cell", interrupted)
    for given, again in (([], "starts again"), (["--store", str(store)], f"goes on with the references in {store}")):
        told = amnesia("demo", "--out", str(tmp_path / "out"), *given, status=130).splitlines()  # W&B may print before
        assert told[-1] == f"amnesia: interrupted, no file is half written; the same command {again}"
    assert given_on == [False, True]
    assert {file.name for file in (tmp_path / "out").iterdir()} <= {"wandb"}


def test_missing_data_and_impossible_budgets_are_refused_and_write_nothing(tmp_path, amnesia):
    for words, message in ((["--data-root", str(tmp_path / "nowhere")], "MNIST"), (["--epochs", "0"], "at least 1")):
        assert message in amnesia("demo", *words, "--out", str(tmp_path / "out"), status=2)
        assert not (tmp_path / "out").exists()
