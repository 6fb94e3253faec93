"""Sections on the stream: its tasks and requests, how well every task is read, and all of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.answers import claim
from avalanche_amnesia.lab.report.charts import Chart, timeline
from avalanche_amnesia.lab.report.evidence import jsd_of, jsd_ratio
from avalanche_amnesia.lab.report.reading import Entry, Event, mean_of, of_task, spread, value_of
from avalanche_amnesia.lab.report.sections.section import Row, Section, table_of_events
from avalanche_amnesia.lab.report.tables import Table, TableCell, mean, number, table, text
from avalanche_amnesia.lab.report.wording import bits, over_seeds, percent, points, seconds, share, times


def summary_table(entries: Sequence[Entry]) -> Table:
    """One row per strategy at the end of its stream: means over seeds."""
    return table("All strategies at the end of the stream", [_summary(entry) for entry in entries])


def timelines(entries: Sequence[Entry]) -> Section:
    """A timeline for all strategies with the same tasks and requests."""
    told: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        told.setdefault((*entry.after, *_gone(entry).items()), []).append(entry)
    charts = []
    for alike in told.values():
        names = "" if len(told) == 1 else f": {', '.join(entry.name for entry in alike)}"
        charts.append(timeline(f"Tasks and requests{names}", alike[0].after, _gone(alike[0])))
    return Section("timeline", charts)


def accuracy(entries: Sequence[Entry]) -> Section:
    """Accuracy of every task after every task."""
    tables = table_of_events("Accuracies", entries, _accuracy_rows)
    return Section("accuracy", [_accuracy_matrix(entry) for entry in entries], tables)


def _summary(entry: Entry) -> Row:
    def at_end(get: Callable[[Event], float | None], words: Callable[[float], str]) -> TableCell:
        return mean(entry.spread(get), words)

    def time(kind: str) -> TableCell:
        return mean(spread(timing[kind] for timing in entry.timings), seconds)

    return {
        "strategy": text(entry.name),
        "seeds": text(len(entry.runs)),
        "claim": text(claim(entry)),
        "accuracy on remaining tasks": at_end(mean_of("accuracy"), percent),
        "against never unlearning": at_end(value_of("accuracy_difference"), points),
        "its control": at_end(value_of("accuracy_difference_control"), points),
        "old head": at_end(mean_of("unlearned_accuracy"), percent),
        "old head, retrained model": at_end(value_of("reference_unlearned_accuracy"), percent),
        "JSD (bit)": at_end(jsd_of(entry, ""), bits),
        "JSD floor: order": at_end(jsd_of(entry, "_floor_order"), bits),
        "JSD / order floor": at_end(jsd_ratio(entry), times),
        "JSD floor: seed": at_end(jsd_of(entry, "_floor_seed"), bits),
        "free capacity": at_end(value_of("capacity"), share),
        "time to unlearn": time("unlearn"),
        "time to retrain": time("retrain"),
    }


def _gone(entry: Entry) -> dict[int, int]:
    """Task → the task after which it was unlearned."""
    return {task: event["task"] for event in entry.requests for task in event["unlearned_now"]}


def _accuracy_matrix(entry: Entry) -> Chart:
    tasks = sorted({int(task) for run in entry.runs for event in run.events for task in _accuracies(event)})
    shown = [[_shown(entry, after, task) for task in tasks] for after in entry.after]
    figure = matrix_figure(
        {"": [[cell for cell, _ in row] for row in shown]},
        rows=entry.after,
        columns=tasks,
        row_label="after task",
        column_label="tested on task",
        note="framed: unlearned, read through its old head",
    )
    return Chart(f"{entry.name}: test accuracy (%)", [words for row in shown for _, words in row if words], figure)


def _shown(entry: Entry, after: int, task: int) -> tuple[Cell | None, str]:
    """Cell of the matrix, and the same in words."""
    found = entry.spread(lambda event: _accuracies(event).get(str(task)), after)
    if found is None:
        return None, ""
    words = f"after task {after}, task {task}: {over_seeds(found, percent)}"
    if entry.spread(of_task("unlearned_accuracy", task), after) is None:
        return Cell(found.mean), words
    words, below = f"{words} through its old head", []
    for key, name, short in (
        ("reference_unlearned", "on the retrained model", "retr."),
        ("chance", "chance", "chance"),
    ):
        value = entry.spread(of_task(key, task), after)
        if value is not None:
            words += f", {name} {over_seeds(value, percent)}"
            below.append(f"{short} {100 * value.mean:.0f}")
    return Cell(found.mean, below, framed=True), words


def _accuracy_rows(event: Event) -> Iterator[Row]:
    unlearned = event.get("unlearned_accuracy") or {}
    for task, value in sorted(_accuracies(event).items(), key=lambda item: int(item[0])):
        if value is not None:
            retrained = of_task("reference_unlearned" if task in unlearned else "reference_accuracy", int(task))
            yield {
                "tested on task": text(int(task)),
                "status": text("unlearned" if task in unlearned else "remains"),
                "accuracy": number(value, percent),
                "retrained model": number(retrained(event), percent),
                "never unlearned": number(of_task("full_accuracy", int(task))(event), percent),
                "chance": number(of_task("chance", int(task))(event), percent),
            }


def _accuracies(event: Event) -> dict[str, float]:
    """Accuracy of every task that was read: remaining ones, and unlearned ones through their old heads."""
    return {**(event.get("accuracy") or {}), **(event.get("unlearned_accuracy") or {})}
