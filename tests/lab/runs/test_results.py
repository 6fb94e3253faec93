"""Files of results: the same numbers as JSON and as a flat table, written as a whole, and reported by a command."""

import csv
import dataclasses
import json

import pytest

from avalanche_amnesia.lab.runs import write_results
from avalanche_amnesia.lab.runs.command_line import main
from avalanche_amnesia.lab.runs.observation import Observation, Run, Timing
from avalanche_amnesia.lab.runs.results import COLUMNS

SETTINGS = {"data": "none", "requests": {1: [0]}, "seed": 3, "budget": {"epochs": 1, "seed": 3}}


def observation(task, **changes):
    """Only a few numbers were measured."""
    absent = {f.name: {} if f.type.startswith("dict") else None for f in dataclasses.fields(Observation)}
    seen = {"task": task, "remaining": (0, 10), "accuracy": {0: 0.5, 10: 0.75}, "capacity": 0.25}
    return Observation(**absent | {"unlearned": (), "unlearned_now": (), "trajectory_bytes": 1024} | seen | changes)


def run(name="EWC"):
    forgot = observation(
        10, unlearned_now=(0,), unlearned=(0,), remaining=(10,), accuracy={10: 0.75}, unlearned_accuracy={0: 0.5},
        jsd={"JSD_own": 0.125, "JSD_own_floor_order": 0.0625}, claim="approximate", reference_unlearned_accuracy=0.5,
    )  # fmt: skip
    return Run(name, None, [observation(0), forgot], [{"plan": {"claim": "approximate"}}], [Timing(10, 0.5, 2.0)])


def rows(folder):
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_number_has_a_row_in_a_stable_order(tmp_path):
    write_results(tmp_path / "new" / "folder", [run("LwF"), run()], SETTINGS)
    found = rows(tmp_path / "new" / "folder")
    assert list(found[0]) == list(COLUMNS)
    assert [row["strategy"] for row in found] == sorted((row["strategy"] for row in found), reverse=True)
    assert {row["seed"] for row in found} == {"3"}
    first = [tuple(row.values())[2:] for row in found if row["strategy"] == "EWC" and row["event"] == "0"]
    assert first == [
        ("0", "0", "accuracy", "0.5"),
        ("0", "10", "accuracy", "0.75"),
        ("0", "", "capacity", "0.25"),
        ("0", "", "mean_accuracy", "0.625"),
        ("0", "0", "remaining", "1"),
        ("0", "10", "remaining", "1"),
        ("0", "", "trajectory_bytes", "1024"),
    ]
    last = {(row["metric"], row["task"]): row["value"] for row in found if row["event"] == "10"}
    assert last["jsd/JSD_own", ""] == "0.125"
    assert last["unlearned_accuracy", "0"] == "0.5"
    assert last["unlearned_now", "0"] == "1"
    assert last["claim", ""] == "approximate"


def test_tables_of_names_and_of_tasks_are_flat(tmp_path):
    class Measured:
        task = 0

        def to_dict(self):
            return {
                "task": 0,
                "jsd_by_task": {"JSD_own": {2: 0.5, 10: 0.25}},
                "owners": {"layers.0": {"free": 0.5, "shared": 0.25, "2": 0.25}},
                "overlap": {"tasks": [2, 10], "shares": [[1.0, 0.5], [0.75, 1.0]]},
                "capacity": None,
            }

    write_results(tmp_path, [Run("EWC", None, [Measured()])], {})
    assert [tuple(row.values())[3:] for row in rows(tmp_path)] == [
        ("2", "jsd_by_task/JSD_own", "0.5"),
        ("10", "jsd_by_task/JSD_own", "0.25"),
        ("2", "overlap/2", "1.0"),
        ("10", "overlap/2", "0.5"),
        ("2", "overlap/10", "0.75"),
        ("10", "overlap/10", "1.0"),
        ("2", "owners/layers.0", "0.25"),
        ("", "owners/layers.0/free", "0.5"),
        ("", "owners/layers.0/shared", "0.25"),
    ]
    assert {row["seed"] for row in rows(tmp_path)} == {""}


def test_the_files_hold_the_same_and_no_seconds_in_the_results(tmp_path):
    write_results(tmp_path, [run()], SETTINGS)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["requests"] == {"1": [0]}
    assert results["strategies"]["EWC"]["events"][1]["jsd"]["JSD_own"] == 0.125
    assert "avalanche-amnesia" in results["versions"]
    assert json.loads((tmp_path / "timings.json").read_text()) == {
        "EWC": [{"after_task": 10, "unlearn": 0.5, "retrain": 2.0}]
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.csv", "results.json", "timings.json"]


def test_two_runs_of_one_name_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="a name of its own"):
        write_results(tmp_path / "new", [run(), run()], SETTINGS)
    assert not (tmp_path / "new").exists()


def test_an_error_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    write_results(tmp_path, [run()], SETTINGS)
    before = (tmp_path / "results.json").read_bytes()
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_results(tmp_path, [run("LwF")], SETTINGS)
    assert (tmp_path / "results.json").read_bytes() == before


def test_the_command_reports_several_runs_as_one_page(tmp_path, capsys):
    write_results(tmp_path / "a", [run()], SETTINGS)
    write_results(tmp_path / "b", [run()], SETTINGS | {"seed": 4, "budget": {"epochs": 1, "seed": 4}})
    out = tmp_path / "pages" / "report.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert "seeds 3 and 4" in out.read_text()


def test_the_command_refuses_what_holds_no_results(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 2
    assert "holds no results.json" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
