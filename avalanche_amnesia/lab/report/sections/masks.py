"""Sections on masks: free capacity, owners of units, overlap of tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.charts import Axis, Chart
from avalanche_amnesia.lab.report.measures import capacity_before
from avalanche_amnesia.lab.report.reading import Entry, Moment, Numbers, number
from avalanche_amnesia.lab.report.sections.section import Section, lines, numbers, table_of_moments
from avalanche_amnesia.lab.report.wording import percent, share

_OVERLAP = "Figure/Overlap/table"


def capacity(entries: Sequence[Entry]) -> Section:
    """Free capacity after each task, and before its requests."""
    columns = {
        "before requests": (capacity_before, share),
        "after requests": (number("Capacity"), share),
        "trajectory": (number("TrajectoryBytes"), lambda value: f"{value / 1024:,.0f} KiB"),
    }
    charts = lines(
        entries,
        "free capacity",
        Axis("capacity (1: all free)", share, "{:g}".format, (0.0, 1.0)),
        ("here", "after each task and its requests", number("Capacity")),
        ("never", "before these requests", capacity_before),
    )
    return Section(
        "capacity",
        "Does the room come back?",
        (
            "Network capacity: how free the network's parameters are for the next task. Learning takes some of it, a "
            "request gives back what only the forgotten tasks had used. Only methods with masks have it.",
        ),
        "capacity",
        charts,
        table_of_moments("Capacity", entries, numbers(columns)),
    )


def owners(entries: Sequence[Entry]) -> Section:
    """Owners of every layer's units around each request, in the run of the first seed."""
    charts = []
    for entry in entries:
        for moment in entry.requests.values():
            shares = _owners(moment)
            if shares:
                title = f"{entry.name}: owners (%), request after {moment.task}"
                tasks = sorted({task for of in shares.values() for task in of if isinstance(task, int)})
                charts.append(_matrix(title, shares, ["free", "shared", *tasks], ("layer", "owner")))
    return Section(
        "owners",
        "Which task owns what?",
        (
            "Share of each layer that only one remaining task uses, that several share, and that is free; before and "
            "after a request, in the run of the first seed.",
        ),
        "owners of units",
        charts,
    )


def overlap(entries: Sequence[Entry]) -> Section:
    """Overlap of the masks of two tasks each, as last measured in the run of the first seed."""
    charts = []
    for entry in entries:
        found = [moment.tables[_OVERLAP] for moment in entry.first.moments if _OVERLAP in moment.tables]
        if found:
            _, *rows = found[-1]
            tasks = [task for task, *_ in rows]
            shares = {task: dict(zip(tasks, of, strict=True)) for task, *of in rows}
            charts.append(_matrix(f"{entry.name}: overlap (%)", shares, tasks, ("task", "with task")))
    return Section(
        "overlap",
        "Which tasks share how much?",
        (
            "What two remaining tasks both use, as a share of what either uses (intersection over union of their "
            "masks), in the run of the first seed. The more is shared, the more an unlearning moves.",
        ),
        "overlap of masks",
        charts,
    )


def _owners(moment: Moment) -> dict[str, dict[int | str, float]]:
    """Layer, before or after the request → task, ``shared`` or ``free`` → share."""
    before, after = _by_layer(moment.first, "OwnersBefore/"), _by_layer(moment.numbers, "Owners/")
    pairs = (("before", before), ("after", after))
    return {f"{layer}, {when}": of[layer] for layer in after for when, of in pairs if layer in of}


def _by_layer(numbers_of: Numbers, kind: str) -> dict[str, dict[int | str, float]]:
    found: dict[str, dict[int | str, float]] = {}
    for name in (name for name in numbers_of if name.startswith(kind)):
        for task, value in numbers_of[name].items():
            layer, owner = (name, task) if task is not None else name.rsplit("/", 1)
            found.setdefault(layer.removeprefix(kind), {})[owner] = value
    return found


def _matrix(
    title: str, shares: Mapping[Any, Mapping[Any, float]], columns: Sequence[Any], labels: tuple[str, str]
) -> Chart:
    """A chart of shares by row and column."""
    row_label, column_label = labels
    figure = matrix_figure(
        {"": [[Cell(of[name]) if name in of else None for name in columns] for of in shares.values()]},
        rows=list(shares),
        columns=columns,
        row_label=row_label,
        column_label=column_label,
    )
    words = [
        f"{row_label} {row}: {', '.join(f'{column_label} {name} {percent(value)}' for name, value in of.items())}"
        for row, of in shares.items()
    ]
    return Chart(title, words, figure)
