"""Sections on the stream: its tasks and requests, how well every task is read, and all of it at the end."""

from collections.abc import Iterator, Sequence

from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.answers import claim
from avalanche_amnesia.lab.report.charts import Chart, timeline
from avalanche_amnesia.lab.report.measures import COLUMNS
from avalanche_amnesia.lab.report.reading import Entry, Moment, number, spread
from avalanche_amnesia.lab.report.sections.section import Row, Section, table_of_moments
from avalanche_amnesia.lab.report.tables import Table, mean, table, text
from avalanche_amnesia.lab.report.tables import number as cell
from avalanche_amnesia.lab.report.wording import over_seeds, percent, seconds

_HEAD = "UnlearnedAccuracy"


def summary_table(entries: Sequence[Entry]) -> Table:
    """One row per strategy at the end of its stream: means over seeds."""
    return table("All strategies at the end of the stream", [_summary(entry) for entry in entries])


def timelines(entries: Sequence[Entry]) -> Section:
    """A timeline for all strategies with the same tasks and requests."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((*entry.after, *_gone(entry).items()), []).append(entry)
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


def _summary(entry: Entry) -> Row:
    return {
        "strategy": text(entry.name),
        "seeds": text(len(entry.runs)),
        "claim": text(claim(entry)),
        **{column.page: mean(entry.spread(column.of), column.words) for column in COLUMNS.values()},
        "time to unlearn": mean(spread(cost.unlearn for cost in entry.costs), seconds),
        "time to retrain": mean(spread(cost.retrain for cost in entry.costs), seconds),
    }


def _gone(entry: Entry) -> dict[int, int]:
    """Task → the task after which it was unlearned."""
    return {task: moment.task for moment in entry.requests.values() for task in moment.unlearned_now}


def _accuracy_matrix(entry: Entry) -> Chart:
    tasks = sorted({task for run in entry.runs for moment in run.moments for task in moment.accuracies})
    shown = [[_shown(entry, place, task) for task in tasks] for place in range(len(entry.after))]
    figure = matrix_figure(
        {"": [[read for read, _ in row] for row in shown]},
        rows=entry.after,
        columns=tasks,
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
