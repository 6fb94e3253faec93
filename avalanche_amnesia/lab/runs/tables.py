"""Tables for the terminal, narrow enough for 60 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from avalanche_amnesia.lab.runs.observation import Observation, Run

_SHORT = {"exact": "exact", "approximate": "appr."}


def number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """A number for a table; a dash for None."""
    if value is None:
        return "–"
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def small(value: float | None) -> str:
    """A number that may be tiny, such as a divergence."""
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-")


def events_table(run: Run) -> Table:
    """One line per task: what remained, what was forgotten, what it cost the others."""
    columns = ("task", "gone", "acc.", "JSD", "order", "ratio", "head", "AD", "ctrl")
    table = _table(f"{run.name}: after every task", columns)
    for seen in run.observations:
        table.add_row(
            str(seen.task),
            ",".join(map(str, seen.unlearned_now)) or "–",
            number(seen.mean_accuracy),
            *_jsd_beside_order(seen),
            number(seen.mean_unlearned_accuracy),
            number(seen.accuracy_difference, signed=True),
            number(seen.accuracy_difference_control, signed=True),
        )
    return table


def forgotten_table(runs: Sequence[Run]) -> Table:
    """One line per strategy at the end of the stream: how well it forgets."""
    table = _table("At the end: unlearned tasks", ("strategy", "JSD", "order", "ratio", "seed", "head", "ref."))
    for run in runs:
        seen = run.observations[-1]
        table.add_row(
            run.name,
            *_jsd_beside_order(seen),
            small(seen.jsd.get("JSD_own_floor_seed")),
            number(seen.mean_unlearned_accuracy),
            number(seen.reference_unlearned_accuracy),
        )
    return table


def _jsd_beside_order(seen: Observation) -> tuple[str, str, str]:
    """JSD, its order floor, and their ratio."""
    own, order, ratio = (seen.jsd.get(f"JSD_own{suffix}") for suffix in ("", "_floor_order", "_ratio_order"))
    return small(own), small(order), number(ratio, 1 if ratio is None or ratio < 100 else 0)


def remaining_table(runs: Sequence[Run]) -> Table:
    """One line per strategy at the end of the stream: how well it remembers, and what it may claim."""
    table = _table("At the end: remaining tasks", ("strategy", "acc.", "AD", "ctrl", "cap.", "claim"))
    for run in runs:
        seen = run.observations[-1]
        table.add_row(
            run.name,
            number(seen.mean_accuracy),
            number(seen.accuracy_difference, signed=True),
            number(seen.accuracy_difference_control, signed=True),
            number(seen.capacity),
            _SHORT.get(seen.claim or "", "–"),
        )
    return table


def cost_table(runs: Sequence[Run]) -> Table:
    """One line per strategy: KiB of trajectory, and seconds to unlearn against seconds to retrain."""
    columns = ("strategy", "KiB", "s to unlearn", "s to retrain", "faster")
    table = _table("What it costs (means over the requests)", columns)
    for run in runs:
        unlearn = [timing.unlearn for timing in run.timings]
        retrain = [timing.retrain for timing in run.timings]
        faster = sum(retrain) / sum(unlearn) if unlearn else None
        table.add_row(
            run.name,
            _kibibytes(run.observations[-1].trajectory_bytes),
            number(_mean(unlearn), 4),
            number(_mean(retrain), 2),
            "–" if faster is None else f"{faster:.0f}×",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding = (0, 0, 0, 0)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _kibibytes(size: int | None) -> str:
    return number(None if size is None else size / 1024, 0)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
