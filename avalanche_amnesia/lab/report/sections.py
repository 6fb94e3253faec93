"""Sections of the report page with their charts and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from avalanche_amnesia.evaluation.resolution import distance_in_words
from avalanche_amnesia.lab.report.charts import Axis, Cell, LineChart, Matrix, Series, scale_of
from avalanche_amnesia.lab.report.measures import JSD, OLD_HEAD, TRACE_TESTS, TraceTest, jsd_names, jsd_of, ratio_of
from avalanche_amnesia.lab.report.reading import Entry, Evaluation, Get, Run, flatten, number
from avalanche_amnesia.lab.report.tables import Row, Table, by_evaluation, cell, text
from avalanche_amnesia.lab.report.wording import MISSING, points, share, times

_GAIN, _CONTROL = number("AccuracyDifference"), number("AccuracyDifference_control")
_BEFORE: Get = attrgetter("capacity_before")


class Section(NamedTuple):
    """Charts, matrices and tables of one section of the report page; all empty if nothing was measured."""

    lines: Sequence[LineChart] = ()
    matrices: Sequence[Matrix] = ()
    tables: Sequence[Table] = ()


def sections_of(entries: Sequence[Entry]) -> dict[str, Section]:
    """Return the report page's sections (charts and tables) by their key in the template, including empty sections."""
    lines = partial(_line_charts, entries)
    return {
        "accuracy": Section(matrices=[each for each in map(_accuracy_matrix, entries) if each.columns]),
        JSD.key: Section(
            lines(
                "JSD",
                JSD.axis,
                ("here", "JSD to the retrained model", jsd_of()),
                ("order", "floor: another data order", jsd_of("_floor_order")),
                ("seed", "floor: another seed", jsd_of("_floor_seed")),
            ),
            tables=by_evaluation("JSD", entries, _jsd_rows),
        ),
        **{test.key: Section(_trace_charts(entries, test)) for test in TRACE_TESTS},
        "difference": Section(
            lines(
                "accuracy difference",
                Axis("points of accuracy", points, lambda value: f"{100 * value:+.3g}" if value else "0"),
                ("here", "against the model that never unlearned", _GAIN),
                ("never", "control: only heads fitted again", _CONTROL),
            ),
        ),
        "transfer": Section(tables=by_evaluation("Remaining tasks", entries, _transfer_rows)),
        "capacity": Section(
            lines(
                "free capacity",
                Axis("capacity (1: all free)", share, "{:g}".format, (0.0, 1.0)),
                ("here", "after each task and its requests", number("Capacity")),
                ("never", "before these requests", _BEFORE),
            ),
        ),
        "settings": Section(
            tables=[
                _comparison("Settings", "setting", entries, lambda run: flatten(run.settings)),
                _comparison("Versions", "package", entries, lambda run: run.versions),
            ]
        ),
    }


def _transfer_rows(moment: Evaluation) -> Iterator[Row]:
    forgetting, transfer = moment.number("Forgetting"), moment.number("BackwardTransfer")
    if forgetting is not None or transfer is not None:
        yield {"average forgetting": cell(forgetting, points), "backward transfer": cell(transfer, points)}


def _jsd_rows(moment: Evaluation) -> Iterator[Row]:
    """Yield a table row per measured JSD: to the retrained model and, as noise floors, between two retrained models."""
    for name in jsd_names(moment):
        by_task = [f"task {task}: {distance_in_words(one)}" for task, one in sorted(moment.by_task(name).items())]
        yield {
            "distance": text(name),
            "value": cell(moment.number(name), distance_in_words),
            "floor: data order": cell(moment.number(f"{name}_floor_order"), distance_in_words),
            "value / data-order floor": cell(ratio_of(moment, name), times),
            "floor: seed": cell(moment.number(f"{name}_floor_seed"), distance_in_words),
            "by task": text("; ".join(by_task) or MISSING),
        }


def _comparison(caption: str, what: str, entries: Sequence[Entry], of: Callable[[Run], Mapping[str, Any]]) -> Table:
    """Return a table with a row per setting (or package) and a column per strategy, with values of its first run."""
    found = [of(entry.first) for entry in entries]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [
        [text(name), *(text(MISSING if each.get(name) is None else each[name]) for each in found)] for name in names
    ]
    return Table(caption, (what, *(entry.name for entry in entries)), rows)


def _line_charts(entries: Sequence[Entry], title: str, axis: Axis, *wanted: tuple[str, str, Get]) -> list[LineChart]:
    """Return a line chart per strategy, all on one scale; ``wanted`` has a triple (role, name, getter) per line."""
    drawn = []
    for entry in entries:
        series = []
        for role, name, get in wanted:
            values = ((position, entry.spread(get, position)) for position in range(len(entry.after)))
            if there := [(position, value) for position, value in values if value is not None]:
                series.append(Series(role, name, there))
        if any(each.role == "here" for each in series):
            drawn.append((entry, series))
    scale = scale_of(axis, [each for _, series in drawn for each in series])
    return [LineChart(entry.name, title, each, axis, scale, entry.after, list(entry.requests)) for entry, each in drawn]


def _trace_charts(entries: Sequence[Entry], shown: TraceTest) -> list[LineChart]:
    """Return charts of a metric of unlearned tasks, on this model and on the retrained model."""
    ends = (("here", "this model", ""), ("retrained", "retrained model", "_reference"), ("chance", "chance", "_chance"))
    lines = ((role, name, number(f"{shown.metric}{end}")) for role, name, end in ends)
    return _line_charts(entries, shown.check, replace(shown.axis, label=f"mean {shown.axis.label}"), *lines)


def _accuracy_matrix(entry: Entry) -> Matrix:
    tested = sorted({task for run in entry.runs for moment in run.moments for task in moment.accuracies})
    cells = [[_accuracy_cell(entry, position, task) for task in tested] for position in range(len(entry.after))]
    return Matrix(entry.name, "test accuracy (%)", entry.after, tested, cells)


def _accuracy_cell(entry: Entry, position: int, task: int) -> Cell | None:
    if (found := entry.spread(lambda moment: moment.accuracies.get(task), position)) is None:
        return None
    if entry.spread(number(OLD_HEAD.metric, task), position) is None:
        return Cell(found.mean)
    below = []
    for suffix, name in (("reference", "retr."), ("chance", "chance")):
        if (value := entry.spread(number(f"{OLD_HEAD.metric}_{suffix}", task), position)) is not None:
            below.append(f"{name} {100 * value.mean:.0f}")
    return Cell(found.mean, below, framed=True)
