"""Sections on masks: free capacity, owners of units, overlap of tasks."""

from collections.abc import Iterator, Mapping, Sequence

from avalanche_amnesia.evaluation.figures import Cell, matrix_figure
from avalanche_amnesia.lab.report.charts import Axis, Chart, Series, owner_bars
from avalanche_amnesia.lab.report.measures import capacity_before
from avalanche_amnesia.lab.report.reading import Entry, Moment, Numbers, Spread, number
from avalanche_amnesia.lab.report.sections.section import Row, Section, drawn, table_of_moments
from avalanche_amnesia.lab.report.tables import number as cell
from avalanche_amnesia.lab.report.tables import table, text
from avalanche_amnesia.lab.report.wording import MISSING, percent, share

_OVERLAP = "Figure/Overlap/table"


def capacity(entries: Sequence[Entry]) -> Section:
    """Free capacity, before and after each request."""
    axis = Axis("capacity (1: all free)", share, "{:g}".format, (0.0, 1.0))
    charts: list[Chart] = []
    for entry in entries:
        seen = _capacities(entry)
        series = [Series("here", "before and after the requests of each task", seen)] if seen else []
        charts += drawn(entry, "free capacity", axis, series)
    return Section(
        "capacity",
        "Does the room come back?",
        (
            "Network capacity: how free the network's parameters are for the next task. Learning takes some of it, a "
            "request gives back what only the forgotten tasks had used. Only methods with masks have it.",
        ),
        "capacity",
        charts,
        table_of_moments("Capacity", entries, _capacity_rows),
    )


def owners(entries: Sequence[Entry]) -> Section:
    """Owners of every layer's units around each request, in the run of the first seed."""
    charts: list[Chart] = []
    rows: list[Row] = []
    for entry in entries:
        for moment in entry.requests.values():
            layers = _owners(moment)
            if layers:
                title = f"{entry.name}: owners, request after {moment.task}"
                charts.append(owner_bars(title, layers, percent, _roles(layers)))
            rows += [
                {
                    "strategy": text(entry.name),
                    "after task": text(moment.task),
                    "layer": text(layer),
                    "moment": text(when),
                    "owner": text(owner),
                    "share": cell(value, percent),
                }
                for layer, moments in layers.items()
                for when, shares in moments.items()
                for owner, value in shares.items()
            ]
    return Section(
        "owners",
        "Which task owns what?",
        (
            "Share of each layer that only one remaining task uses, that several share, and that are free; before and "
            "after a request, in the run of the first seed.",
        ),
        "owners of units",
        charts,
        [table("Owners", rows)] if rows else [],
    )


def overlap(entries: Sequence[Entry]) -> Section:
    """Overlap of the masks of two tasks each, as last measured in the run of the first seed."""
    charts = []
    for entry in entries:
        found = [moment.tables[_OVERLAP] for moment in entry.first.moments if _OVERLAP in moment.tables]
        if found:
            _, *rows = found[-1]
            tasks = [task for task, *_ in rows]
            figure = matrix_figure(
                {"": [[Cell(share) for share in shares] for _, *shares in rows]},
                rows=tasks,
                columns=tasks,
                row_label="task",
                column_label="with task",
            )
            numbers = [
                f"task {task} with task {other}: {percent(share)}"
                for task, *shares in rows
                for other, share in zip(tasks, shares, strict=True)
            ]
            charts.append(Chart(f"{entry.name}: overlap (%)", numbers, figure))
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


def _capacities(entry: Entry) -> list[tuple[float, Spread]]:
    """(place, number): two beside each other where a request gave some back."""
    found: list[tuple[float, Spread]] = []
    for place in range(len(entry.after)):
        before = entry.spread(capacity_before, place) if place in entry.requests else None
        now = entry.spread(number("Capacity"), place)
        if before is not None:
            found.append((place - 0.12, before))
        if now is not None:
            found.append((place + 0.12 if before is not None and place < len(entry.after) - 1 else place, now))
    return found


def _capacity_rows(moment: Moment) -> Iterator[Row]:
    if moment.number("Capacity") is not None:
        yield {
            "unlearned now": text(", ".join(map(str, moment.unlearned_now)) or MISSING),
            "before requests": cell(capacity_before(moment), share),
            "after requests": cell(moment.number("Capacity"), share),
            "trajectory": cell(moment.number("TrajectoryBytes"), lambda value: f"{value / 1024:,.0f} KiB"),
        }


def _owners(moment: Moment) -> dict[str, dict[str, dict[str, float]]]:
    """Layer → moment → owner → share."""
    before, after = _named(moment.first, "OwnersBefore/"), _named(moment.numbers, "Owners/")
    return {
        layer: {when: of[layer] for when, of in (("before", before), ("after", after)) if layer in of}
        for layer in after
    }


def _named(numbers: Numbers, kind: str) -> dict[str, dict[str, float]]:
    """Layer → owner → share: tasks in order, then shared and free."""
    layers: dict[str, dict[str, float]] = {}
    names = [name for name in numbers if name.startswith(kind)]
    for name in names:
        for task, value in sorted((task, value) for task, value in numbers[name].items() if task is not None):
            layers.setdefault(name.removeprefix(kind), {})[f"task {task}"] = value
    for owner in ("shared", "free"):
        for name in names:
            of_nobody = numbers[name].get(None)
            if name.endswith(f"/{owner}") and of_nobody:
                layers.setdefault(name.removeprefix(kind).removesuffix(f"/{owner}"), {})[owner] = of_nobody
    return layers


def _roles(layers: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, str]:
    """Owner → role that colours its part, in the order of the legend."""
    named = {owner for moments in layers.values() for of in moments.values() for owner in of}
    tasks = sorted(int(owner.removeprefix("task ")) for owner in named - {"shared", "free"})
    roles = {f"task {task}": f"task{task % 6}" for task in tasks}
    return roles | {owner: owner for owner in ("shared", "free") if owner in named}
