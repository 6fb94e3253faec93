"""Sections on the stream and the runs: tasks and requests, how well tasks are read, what unlearning cost, settings."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.answers import claim
from avalanche_amnesia.lab.report.charts import Axis, Chart, timeline
from avalanche_amnesia.lab.report.measures import COLUMNS
from avalanche_amnesia.lab.report.reading import Entry, Moment, Run, flat, number, spread
from avalanche_amnesia.lab.report.sections.section import Row, Section, lines, numbers, table_of_moments, table_of_seeds
from avalanche_amnesia.lab.report.tables import Table, mean, table, text
from avalanche_amnesia.lab.report.tables import number as cell
from avalanche_amnesia.lab.report.wording import MISSING, over_seeds, percent, points, seconds, tasks

_HEAD = "UnlearnedAccuracy"
_GAIN, _CONTROL = number("AccuracyDifference"), number("AccuracyDifference_control")


def summary_table(entries: Sequence[Entry]) -> Table:
    """One row per strategy at the end of its stream: means over seeds."""
    rows = [
        {
            "strategy": text(entry.name),
            "seeds": text(len(entry.runs)),
            "claim": text(claim(entry)),
            **{column.page: mean(entry.spread(column.of), column.words) for column in COLUMNS.values()},
            "time to unlearn": mean(spread(cost.unlearn for cost in entry.costs), seconds),
            "time to retrain": mean(spread(cost.retrain for cost in entry.costs), seconds),
        }
        for entry in entries
    ]
    return table("All strategies at the end of the stream", rows)


def timelines(entries: Sequence[Entry]) -> Section:
    """A timeline for all strategies with the same tasks and requests."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(str((entry.after, _gone(entry))), []).append(entry)
    charts = []
    for alike in groups.values():
        names = "" if len(groups) == 1 else f": {', '.join(entry.name for entry in alike)}"
        charts.append(timeline(f"Tasks and requests{names}", alike[0].after, _gone(alike[0])))
    return Section(
        "timeline",
        "What was learned, and what was asked to be forgotten?",
        ("The network learned these tasks one after another. A request asks it to unlearn tasks: ✕.",),
        charts=charts,
    )


def accuracy(entries: Sequence[Entry]) -> Section:
    """Accuracy of every task after every task."""
    return Section(
        "accuracy",
        "How well is every task read?",
        (
            "A row per moment, a column per task, dark where the task is read well. Framed cells are unlearned tasks, "
            "read through the classifier they had: near the retrained model's reading (retr.) and chance is good.",
        ),
        charts=[_accuracy_matrix(entry) for entry in entries],
        tables=table_of_moments("Accuracies", entries, _accuracy_rows),
    )


def difference(entries: Sequence[Entry]) -> Section:
    """Accuracy against a model that never unlearned; one scale for all strategies."""
    moments = [moment for entry in entries for run in entry.runs for moment in run.moments]
    found = [get(moment) or 0.0 for moment in moments for get in (_GAIN, _CONTROL)]
    axis = Axis("points of accuracy", points, _signed, (min(found), max(found)))
    charts = lines(
        entries,
        "accuracy difference",
        axis,
        ("here", "against the model that never unlearned", _GAIN),
        ("never", "control: only heads fitted again", _CONTROL),
    )
    rows = numbers({"AD": (_GAIN, points), "AD, control": (_CONTROL, points)})
    return Section(
        "difference",
        "What did it cost the other tasks?",
        (
            "AD, the accuracy difference: accuracy on the remaining tasks minus that of the same method where it "
            "ignored every request. Below 0 is a loss, above 0 a gain. The control is what the model that ignored "
            "every request gains when its heads are fitted again and nothing is unlearned: only what AD has beyond it "
            "is due to the unlearning.",
        ),
        "accuracy difference",
        charts,
        table_of_moments("Accuracy difference", entries, rows),
    )


def transfer(entries: Sequence[Entry]) -> Section:
    """Forgetting and backward transfer."""
    gained = {"average forgetting": number("Forgetting"), "backward transfer": number("BackwardTransfer")}
    rows = numbers({name: (get, points) for name, get in gained.items()})
    return Section(
        "transfer",
        "What else was forgotten, unasked?",
        (
            "Accuracy that remaining tasks lost since their best moment (average forgetting, 0 is none), and what they "
            "gained since they were learned (backward transfer).",
        ),
        "forgetting and backward transfer",
        tables=table_of_moments("Remaining tasks", entries, rows),
    )


def cost(entries: Sequence[Entry]) -> Section:
    """Seconds of every request, and of retraining in its place."""
    return Section(
        "cost",
        "How long does a request take, and how long retraining?",
        ("Wall-clock time on the machine of the run.",),
        "seconds",
        tables=table_of_seeds("Seconds", entries, _cost_rows),
    )


def settings(runs: Sequence[Run]) -> Section:
    """Settings and versions, a column for all runs of the same ones."""
    tables = [
        _compared("Settings", "setting", runs, lambda run: flat(run.settings)),
        _compared("Versions", "package", runs, lambda run: run.versions),
    ]
    return Section("settings", "Settings and versions", (), tables=tables)


def _gone(entry: Entry) -> dict[int, int]:
    """Task → the task after which it was unlearned."""
    return {task: moment.task for moment in entry.requests.values() for task in moment.unlearned_now}


def _accuracy_matrix(entry: Entry) -> Chart:
    tested = sorted({task for run in entry.runs for moment in run.moments for task in moment.accuracies})
    shown = [[_shown(entry, place, task) for task in tested] for place in range(len(entry.after))]
    figure = matrix_figure(
        {"": [[read for read, _ in row] for row in shown]},
        rows=entry.after,
        columns=tested,
        row_label="after task",
        column_label="tested on task",
        note="framed: unlearned, read through its old head",
    )
    return Chart(f"{entry.name}: test accuracy (%)", [words for row in shown for _, words in row if words], figure)


def _shown(entry: Entry, place: int, task: int) -> tuple[Cell | None, str]:
    """Cell of the matrix, and the same in words."""
    found = entry.spread(lambda moment: moment.accuracies.get(task), place)
    if found is None:
        return None, ""
    words = f"after task {entry.after[place]}, task {task}: {over_seeds(found, percent)}"
    if entry.spread(number(_HEAD, task), place) is None:
        return Cell(found.mean), words
    words, below = f"{words} through its old head", []
    for suffix, name, short in (("reference", "on the retrained model", "retr."), ("chance", "chance", "chance")):
        value = entry.spread(number(f"{_HEAD}_{suffix}", task), place)
        if value is not None:
            words += f", {name} {over_seeds(value, percent)}"
            below.append(f"{short} {100 * value.mean:.0f}")
    return Cell(found.mean, below, framed=True), words


def _accuracy_rows(moment: Moment) -> Iterator[Row]:
    for task, value in sorted(moment.accuracies.items()):
        gone = task in moment.by_task(_HEAD)
        yield {
            "tested on task": text(task),
            "status": text("unlearned" if gone else "remains"),
            "accuracy": cell(value, percent),
            "retrained model": cell(moment.number(f"{_HEAD if gone else 'Accuracy'}_reference", task), percent),
            "never unlearned": cell(moment.number("Accuracy_full", task), percent),
            "chance": cell(moment.number(f"{_HEAD}_chance", task), percent),
        }


def _cost_rows(run: Run) -> Iterator[Row]:
    for cost in run.costs:
        times = cost.retrain / cost.unlearn if cost.unlearn else None
        yield {
            "after task": text(cost.after),
            "to unlearn (s)": cell(cost.unlearn, seconds),
            "to retrain (s)": cell(cost.retrain, seconds),
            "times faster": cell(times, lambda value: f"{value:,.0f}×"),
        }


def _compared(caption: str, what: str, runs: Sequence[Run], of: Callable[[Run], Mapping[str, Any]]) -> Table:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps([run.settings, run.versions], sort_keys=True), []).append(run)
    found = [of(group[0]) for group in alike.values()]
    folders = [os.path.commonpath([run.folder for run in group]) for group in alike.values()]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [[text(name), *(text(_set_to(each.get(name))) for each in found)] for name in names]
    return Table(caption, (what, *folders), rows)


def _set_to(value: object) -> str:
    if isinstance(value, dict):  # requests
        return "; ".join(f"{tasks(gone)} after task {after}" for after, gone in value.items())
    return MISSING if value is None else str(value)


def _signed(value: float) -> str:
    return f"{100 * value:+.3g}" if value else "0"
