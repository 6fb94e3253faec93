"""Runs read from their logs, and the table and page made of them."""

import copy
import csv
import io
import json
import operator
from contextlib import suppress
from functools import reduce
from itertools import product

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.fault_injection import places

from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
from avalanche_amnesia.lab.logging import JSONLogger
from avalanche_amnesia.lab.logging.json_lines import JSONWriter
from avalanche_amnesia.lab.logging.run_lines import JSONRunError
from avalanche_amnesia.lab.report import entries, read_run, verdicts
from avalanche_amnesia.lab.report.page import report_page
from avalanche_amnesia.lab.report.reading import read_runs
from avalanche_amnesia.lab.report.tables import CSV_COLUMNS, csv_of

SETTINGS = {"data": "none", "requests": {1: [0]}, "seed": 3, "budget": {"epochs": 1, "seed": 3}}
EVENTS = ("event", "what", "task", "unlearned", "remaining", "affected", "claim", "accuracy")
TRAINED = ((1, "trained", 0, None, "0", None, None, 0.5), (2, "trained", 10, None, "0, 10", None, None, 0.5))
GONE = (3, "unlearned", 10, "0", "10", "", "approximate", 0.75)


def accuracy(task):
    return f"Top1_Acc_Exp/eval_phase/test_stream/Task{task:03d}/Exp{task:03d}"


def table(*rows):
    return {"_type": "table", "columns": list(EVENTS), "data": [list(row) for row in rows]}


def write(folder, name="EWC", settings=SETTINGS):
    """Write the log of a run of tasks 0 and 10 that unlearns task 0."""
    JSONLogger(folder, name=name, config=settings).finish()
    writer = JSONWriter(folder)
    for event, task, values in (
        (1, 0, {"Loss/train_phase/train_stream/Task000": 9.0, "Capacity": 0.5}),
        (1, 0, {accuracy(0): 0.5, "Events": table(TRAINED[0])}),
        (2, 10, {"Capacity": 0.25, "CapacityBefore": 0.25}),
        (3, 10, {"Capacity": 0.375, "Owners/layers.0/free": 0.5, "Owners/layers.0/Task010": 0.5}),
        (3, 10, {"SecondsToUnlearn/eval_phase/test_stream": 0.5, "SecondsToRetrain/eval_phase/test_stream": 2.0}),
        (3, 10, {accuracy(10): 0.5, "JSD_own/eval_phase/test_stream/Task000": 0.125}),
        (3, 10, {"Events": table(*TRAINED, GONE)}),
        (3, 10, {accuracy(10): 0.75, "Events": table(*TRAINED, GONE)}),  # a second evaluation: the last value counts
    ):
        writer._append("row", values={**values, "iteration": 4 * event, "task": task, "event": event})
    return folder


def test_a_moment_has_all_values_up_to_an_evaluation(tmp_path):
    run = read_run(write(tmp_path / "run"))
    assert (run.name, run.seed, run.settings["budget"]["epochs"]) == ("EWC", 3, 1)
    first, last = run.moments
    assert (first.task, first.remaining, first.unlearned, first.claim) == (0, (0,), (), None)
    assert first.numbers == {"Capacity": {None: 0.5}, "Top1_Acc_Exp": {0: 0.5}}
    assert (last.task, last.remaining, last.unlearned, last.unlearned_now) == (10, (10,), (0,), (0,))
    assert last.claim == "approximate"
    assert (last.accuracy, last.by_task("JSD_own"), last.number("JSD_own")) == ({10: 0.75}, {0: 0.125}, None)
    assert last.number("Capacity") == 0.375
    assert last.capacity_before == 0.25
    assert last.by_task("Owners/layers.0") == {10: 0.5}
    assert [(cost.after, cost.unlearn, cost.retrain) for cost in run.costs] == [(10, 0.5, 2.0)]


def test_the_table_has_a_row_for_each_number_except_seconds(tmp_path):
    runs = [read_run(write(tmp_path / name, name)) for name in ("LwF", "EWC")]
    rows = list(csv.reader(io.StringIO(csv_of(runs).decode())))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row[0] for row in rows[1:]] == sorted((row[0] for row in rows[1:]), reverse=True)
    assert {row[1] for row in rows[1:]} == {"3"}
    assert [tuple(row[2:]) for row in rows if row[0] == "EWC"] == [
        *(("0", "0", "remaining", "1"), ("0", "", "claim", ""), ("0", "", "Capacity", "0.5")),
        *(("0", "0", "Top1_Acc_Exp", "0.5"), ("10", "10", "remaining", "1"), ("10", "0", "unlearned", "1")),
        *(("10", "0", "unlearned_now", "1"), ("10", "", "claim", "approximate"), ("10", "", "Capacity", "0.375")),
        *(("10", "0", "JSD_own", "0.125"), ("10", "10", "Owners/layers.0", "0.5")),
        *(("10", "", "Owners/layers.0/free", "0.5"), ("10", "10", "Top1_Acc_Exp", "0.75")),
    ]


def test_a_report_says_which_records_are_signed(tmp_path):
    nothing = dict.fromkeys(("removed", "affected", "compensated", "purges", "unpurged"), ())
    plan = UnlearningPlan((0,), "after task 10", **nothing, entries={}, shared={}, claim="exact", trajectory_bytes=0)
    record = UnlearningRecord(plan, (), (), (10,), 4, 80, 0.1)
    (write(tmp_path) / "records").mkdir()
    with (tmp_path / "run.jsonl").open("a") as log:
        for number, text in enumerate((record.to_json(), record.sign(Ed25519PrivateKey.generate()))):
            (tmp_path / f"records/{number}.json").write_text(text)
            log.write(json.dumps({"kind": "record", "path": f"records/{number}.json"}) + "\n")
    page = report_page([read_run(tmp_path)])
    assert [page.count(words) for words in (">not signed<", ">signed, not checked<")] == [1, 1]


def test_values_that_are_nan_or_null_are_missing(tmp_path):
    file = write(tmp_path) / "run.jsonl"
    text = file.read_text().replace('"Capacity": 0.375', '"Capacity": 1').replace('Task000": 0.125', 'Task000": NaN')
    file.write_text(text.replace('/test_stream": 2.0', '/test_stream": null'))
    run = read_run(tmp_path)
    assert (run.last.number("Capacity"), run.last.by_task("JSD_own"), run.costs) == (1, {}, [])
    assert not {"iteration", "task", "event"} & run.last.numbers.keys()
    assert "<h1>" in report_page([run])


def test_the_command_reports_several_runs_as_one_page(tmp_path, amnesia):
    write(tmp_path / "a" / "deep")
    write(tmp_path / "b", settings=SETTINGS | {"seed": 4, "budget": {"epochs": 1, "seed": 4}})
    out = tmp_path / "pages" / "report.html"
    verdict, told = amnesia("report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)).splitlines()
    assert verdict == "EWC  undecided: tests too weak (2 records are missing)"
    assert "report.html" in told
    for words in ("undecided: tests too weak", "2 records are missing", "seeds 3 and 4"):
        assert words in out.read_text()


def test_folders_without_evaluated_runs_are_refused(tmp_path, amnesia):
    JSONLogger(tmp_path / "never evaluated").finish()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"holds no run.jsonl of an evaluated run"):
            read_runs(folder)
    assert "holds no run.jsonl" in amnesia("report", str(tmp_path), "--out", str(tmp_path / "report.html"), status=2)
    assert not (tmp_path / "report.html").exists()


def test_broken_lines_and_missing_records_are_named(tmp_path):
    whole = (write(tmp_path) / "run.jsonl").read_text()
    record = json.dumps({"kind": "record", "path": "records/1.json"}) + "\n"
    for text, words in (
        (whole.replace('"event": 2', '"xevent": 2', 1), r"line 5 of .*run\.jsonl is broken: it has no "),
        (whole.replace('"name"', '"xname"', 1), r"line 1 of .*run\.jsonl is broken: it has no "),
        ("{\n", "line 1 of"),
        (whole + record, r"names records/1.json, which is not there"),
    ):
        (tmp_path / "run.jsonl").write_text(text)
        with pytest.raises(JSONRunError, match=words):
            read_run(tmp_path)


def test_runs_that_were_stopped_or_failed_are_marked(tmp_path):
    file = write(tmp_path / "run") / "run.jsonl"
    whole = file.read_text()
    file.write_text(whole.replace('"exit_code": 0', '"exit_code": 1'))
    assert not read_run(tmp_path / "run").ended
    file.write_text("".join(line for line in whole.splitlines(keepends=True) if '"end"' not in line))
    assert "seed 3 stopped after task 10" in report_page(read_runs(tmp_path))
    assert verdicts.verdict_of([read_run(write(tmp_path / "other"))]).notes == "1 record is missing"


def test_entries_with_equal_names_are_told_apart_by_their_settings(tmp_path):
    for place, (name, rate, stream_seed) in enumerate(
        [("random", 0.2, 1), ("random", 0.7, 1), ("first", 0, 1), ("random", 0.2, 2)]
    ):
        stream = {"name": "Digits", "options": {"seed": stream_seed}}
        settings = {"seed": 3, "scenario": {"name": name, "options": {"rate": rate}}, "stream": stream}
        write(tmp_path / str(place), settings=settings)
    found = [entry.name for entry in entries(read_runs(tmp_path))]
    assert len(set(found)) == 4
    assert found[2].startswith("EWC (scenario first")


HOSTILE = (10**400, -(10**30), 1.7e308, 5e-324, -1, True, None, "x", "\ud800", [], [1], {}, {"a": 1}, float("nan"))


@pytest.mark.parametrize("number", range(8))
def test_hostile_values_are_missing_or_name_their_line(number, tmp_path):
    lines = [json.loads(line) for line in (write(tmp_path / "good") / "run.jsonl").read_text().splitlines()]
    spots = [(at, path) for at, line in enumerate(lines) for path in places(line) if path != ("kind",)]
    for (at, path), value in list(product(spots, HOSTILE))[number::80]:
        changed = copy.deepcopy(lines)
        *outer, last = path
        reduce(operator.getitem, outer, changed[at])[last] = value
        folder = tmp_path / "bad"
        folder.mkdir(exist_ok=True)
        (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        with suppress(JSONRunError):
            run = read_run(folder)
            assert not run.moments or (report_page([run]) and csv_of([run]))
