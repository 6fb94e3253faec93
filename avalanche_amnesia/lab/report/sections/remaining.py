"""Sections on the remaining tasks: what they lost and gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from avalanche_amnesia.lab.report.charts import Axis, Chart
from avalanche_amnesia.lab.report.reading import Entry, Event, SeedRun, value_of
from avalanche_amnesia.lab.report.sections.section import (
    Row,
    Section,
    lines,
    series_of,
    table_of_events,
    table_of_seeds,
)
from avalanche_amnesia.lab.report.tables import number
from avalanche_amnesia.lab.report.wording import points


def difference(entries: Sequence[Entry]) -> Section:
    """Accuracy against a model that never unlearned; one scale for all strategies."""
    keys = ("accuracy_difference", "accuracy_difference_control")
    found = [event.get(key) or 0.0 for entry in entries for run in entry.runs for event in run.events for key in keys]
    axis = Axis("points of accuracy", points, _signed, (min(found), max(found)))
    charts: list[Chart] = []
    for entry in entries:
        series = series_of(
            entry,
            ("here", "against the model that never unlearned", value_of(keys[0])),
            ("never", "control: heads fitted anew alone", value_of(keys[1])),
        )
        charts += lines(entry, "accuracy difference", series, axis)
    return Section("difference", charts, table_of_events("Accuracy difference", entries, _difference_rows))


def transfer(entries: Sequence[Entry]) -> Section:
    """Forgetting and backward transfer at the end of the stream."""
    return Section("transfer", tables=table_of_seeds("Remaining tasks", entries, _transfer_rows))


def _difference_rows(event: Event) -> Iterator[Row]:
    if event.get("accuracy_difference") is not None:
        yield {
            "AD": number(event["accuracy_difference"], points),
            "AD, control": number(event.get("accuracy_difference_control"), points),
        }


def _transfer_rows(run: SeedRun) -> Iterator[Row]:
    forgetting, transferred = run.last.get("average_forgetting"), run.last.get("backward_transfer")
    if forgetting is not None or transferred is not None:
        yield {"average forgetting": number(forgetting, points), "backward transfer": number(transferred, points)}


def _signed(value: float) -> str:
    return f"{100 * value:+.3g}" if value else "0"
