"""Sections on masks: free capacity, owners of units, overlap of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.charts import Axis, Chart, Series, owner_bars
from avalanche_amnesia.lab.report.reading import Entry, Event, Spread, value_of
from avalanche_amnesia.lab.report.sections.section import Row, Section, lines, request_places, table_of_events
from avalanche_amnesia.lab.report.tables import number, table, text
from avalanche_amnesia.lab.report.wording import MISSING, percent, share


def capacity(entries: Sequence[Entry]) -> Section:
    """Free capacity, before and after each request."""
    axis = Axis("capacity (1: all free)", share, "{:g}".format, (0.0, 1.0))
    charts: list[Chart] = []
    for entry in entries:
        seen = _capacities(entry)
        series = [Series("here", "before and after the requests of each task", seen)] if seen else []
        charts += lines(entry, "free capacity", series, axis)
    return Section("capacity", charts, table_of_events("Capacity", entries, _capacity_rows))


def owners(entries: Sequence[Entry]) -> Section:
    """Owners of every layer's units around each request, in the run of the first seed."""
    charts: list[Chart] = []
    rows: list[Row] = []
    for entry in entries:
        for event in entry.requests:
            layers = _owners(event)
            if layers:
                title = f"{entry.name}: owners, request after {event['task']}"
                charts.append(owner_bars(title, layers, percent, _roles(layers)))
            rows += [
                {
                    "strategy": text(entry.name),
                    "after task": text(event["task"]),
                    "layer": text(layer),
                    "moment": text(moment),
                    "owner": text(owner),
                    "share": number(value, percent),
                }
                for layer, moments in layers.items()
                for moment, shares in moments.items()
                for owner, value in shares.items()
            ]
    return Section("owners", charts, [table("Owners", rows)] if rows else [])


def overlap(entries: Sequence[Entry]) -> Section:
    """Overlap of the masks of two tasks each, as last measured in the run of the first seed."""
    charts = []
    for entry in entries:
        measured = [event["overlap"] for event in entry.first.events if (event.get("overlap") or {}).get("tasks")]
        if measured:
            tasks = measured[-1]["tasks"]
            shares = measured[-1]["shares"]
            figure = matrix_figure(
                {"": [[None if share is None else Cell(share) for share in row] for row in shares]},
                rows=tasks,
                columns=tasks,
                row_label="task",
                column_label="with task",
            )
            numbers = [
                f"task {task} with task {other}: {percent(share)}"
                for task, row in zip(tasks, shares, strict=True)
                for other, share in zip(tasks, row, strict=True)
                if share is not None
            ]
            charts.append(Chart(f"{entry.name}: overlap (%)", numbers, figure))
    return Section("overlap", charts)


def _capacities(entry: Entry) -> list[tuple[float, Spread]]:
    """(place, number): two beside each other where a request gave some back."""
    found: list[tuple[float, Spread]] = []
    for place, after in enumerate(entry.after):
        before = entry.spread(value_of("capacity_before"), after) if place in request_places(entry) else None
        now = entry.spread(value_of("capacity"), after)
        if before is not None:
            found.append((place - 0.12, before))
        if now is not None:
            found.append((place + 0.12 if before is not None and place < len(entry.after) - 1 else place, now))
    return found


def _capacity_rows(event: Event) -> Iterator[Row]:
    if event.get("capacity") is not None:
        yield {
            "unlearned now": text(", ".join(map(str, event.get("unlearned_now") or ())) or MISSING),
            "before requests": number(event.get("capacity_before"), share),
            "after requests": number(event["capacity"], share),
            "trajectory": number(event.get("trajectory_bytes"), lambda value: f"{value / 1024:,.0f} KiB"),
        }


def _owners(event: Event) -> dict[str, dict[str, dict[str, float]]]:
    """Layer → moment → owner → share."""
    before = event.get("owners_before") or {}
    return {
        layer: {moment: _named(of) for moment, of in (("before", before.get(layer)), ("after", after)) if of}
        for layer, after in (event.get("owners") or {}).items()
    }


def _named(owners: Mapping[str, float]) -> dict[str, float]:
    """Shares of a layer under the owners' names: tasks in order, then shared and free."""
    of_tasks = sorted((int(owner), value) for owner, value in owners.items() if owner.isdigit())
    named = {f"task {task}": value for task, value in of_tasks}
    return named | {owner: owners[owner] for owner in ("shared", "free") if owners.get(owner)}


def _roles(layers: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, str]:
    """Owner → role that colours its part, in the order of the legend."""
    named = {owner for moments in layers.values() for of in moments.values() for owner in of}
    tasks = sorted(int(owner.removeprefix("task ")) for owner in named - {"shared", "free"})
    roles = {f"task {task}": f"task{task % 6}" for task in tasks}
    return roles | {owner: owner for owner in ("shared", "free") if owner in named}
