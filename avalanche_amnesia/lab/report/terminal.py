"""Tables for the terminal, narrow enough for 60 columns."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from avalanche_amnesia.lab.report.measures import COLUMNS
from avalanche_amnesia.lab.report.reading import Moment, Run, spread

_SHORT = {"exact": "exact", "approximate": "appr."}
_EVENTS = ("remaining", "jsd", "order", "ratio", "unlearned", "difference", "control")
_FORGOTTEN = ("jsd", "order", "ratio", "seed", "unlearned", "reference")
_REMAINING = ("remaining", "difference", "control", "capacity")


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def events_table(run: Run) -> Table:
    """One line per task: what remained, what was forgotten, what it cost the others."""
    table = _table(f"{run.name}: after every task", ("task", "gone", *_heads(_EVENTS)))
    for moment in run.moments:
        gone = ",".join(map(str, moment.unlearned_now)) or "–"
        table.add_row(str(moment.task), gone, *_cells(moment, _EVENTS))
    return table


def forgotten_table(runs: Sequence[Run]) -> Table:
    """One line per strategy at the end of the stream: how well it forgets."""
    table = _table("At the end: unlearned tasks", ("strategy", *_heads(_FORGOTTEN)))
    for run in runs:
        table.add_row(run.name, *_cells(run.last, _FORGOTTEN))
    return table


def remaining_table(runs: Sequence[Run]) -> Table:
    """One line per strategy at the end of the stream: how well it remembers, and what it may claim."""
    table = _table("At the end: remaining tasks", ("strategy", *_heads(_REMAINING), "claim"))
    for run in runs:
        table.add_row(run.name, *_cells(run.last, _REMAINING), _SHORT.get(run.last.claim or "", "–"))
    return table


def cost_table(runs: Sequence[Run]) -> Table:
    """One line per strategy: KiB of trajectory, and seconds to unlearn against seconds to retrain."""
    columns = ("strategy", "KiB", "s to unlearn", "s to retrain", "faster")
    table = _table("What it costs (means over the requests)", columns)
    for run in runs:
        size = run.last.number("TrajectoryBytes")
        unlearn, retrain = spread(cost.unlearn for cost in run.costs), spread(cost.retrain for cost in run.costs)
        table.add_row(
            run.name,
            number(None if size is None else size / 1024, 0),
            number(None if unlearn is None else unlearn.mean, 4),
            number(None if retrain is None else retrain.mean, 2),
            f"{retrain.mean / unlearn.mean:.0f}×" if unlearn and retrain else "–",
        )
    return table


def _heads(keys: Sequence[str]) -> list[str]:
    return [COLUMNS[key].short for key in keys]


def _cells(moment: Moment, keys: Sequence[str]) -> list[str]:
    values = ((COLUMNS[key], COLUMNS[key].of(moment)) for key in keys)
    return ["–" if value is None else column.cell(value) for column, value in values]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding = (0, 0, 0, 0)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table
