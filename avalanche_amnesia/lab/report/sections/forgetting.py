"""Sections on what is left of the unlearned tasks, beside a model that never saw them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from avalanche_amnesia.lab.report.charts import Axis, Chart, dot_chart
from avalanche_amnesia.lab.report.evidence import is_distance, jsd_name, jsd_of, jsd_reading, ratio_of
from avalanche_amnesia.lab.report.reading import Entry, Event, mean_of, of_task, value_of
from avalanche_amnesia.lab.report.sections.section import (
    Row,
    Section,
    lines,
    measured,
    series_of,
    table_of_events,
)
from avalanche_amnesia.lab.report.tables import number, text
from avalanche_amnesia.lab.report.wording import MISSING, bits, percent, share, times


def old_head(entries: Sequence[Entry]) -> Section:
    """Accuracy through the unlearned tasks' old heads, at the end of the stream."""
    names = {"here": "this model", "retrained": "retrained model, which never saw the task", "chance": "chance"}
    axis = Axis("accuracy on the unlearned task", percent, "{:.0%}".format, (0.0, 1.0))
    charts = []
    for entry in entries:
        rows = {
            f"task {task}": measured(
                here=entry.spread(of_task("unlearned_accuracy", task)),
                retrained=entry.spread(of_task("reference_unlearned", task)),
                chance=entry.spread(of_task("chance", task)),
            )
            for task in entry.unlearned
        }
        rows["mean"] = measured(
            here=entry.spread(mean_of("unlearned_accuracy")),
            retrained=entry.spread(value_of("reference_unlearned_accuracy")),
            chance=entry.spread(mean_of("chance", among="unlearned_accuracy")),
        )
        read = [(words, marks) for words, marks in rows.items() if "here" in marks]
        if read:
            charts.append(dot_chart(f"{entry.name}: old heads", read, names, axis))
    return Section("old-head", charts)


def jsd(entries: Sequence[Entry]) -> Section:
    """JSD to the retrained model, beside its floors."""
    probes = {"JSD_own": ", own masks", "JSD_remaining": ", masks of remaining tasks", "JSD_none": ", no masks"}
    charts: list[Chart] = []
    for entry in entries:
        series = series_of(
            entry,
            ("here", "JSD to the retrained model", jsd_of(entry, "")),
            ("order", "floor: another data order", jsd_of(entry, "_floor_order")),
            ("seed", "floor: another seed", jsd_of(entry, "_floor_seed")),
        )
        title = f"JSD{probes.get(jsd_name(entry) or '', '')}"
        charts += lines(entry, title, series, Axis("JSD (bit)", bits, bits))
    return Section("jsd", charts, table_of_events("JSD", entries, _jsd_rows))


def relapse(entries: Sequence[Entry]) -> Section:
    """Accuracy of new linear classifiers on unlearned tasks."""
    return _probed(entries, "relapse", "linear probe", Axis("accuracy", percent, "{:.0%}".format, (0.0, 1.0)))


def few_shot(entries: Sequence[Entry]) -> Section:
    """Accuracy of linear classifiers that had a few samples of unlearned tasks."""
    return _probed(entries, "few_shot", "few shots", Axis("accuracy", percent, "{:.0%}".format, (0.0, 1.0)))


def membership(entries: Sequence[Entry]) -> Section:
    """Membership inference on unlearned tasks."""
    return _probed(entries, "membership", "membership", Axis("AUC", share, "{:g}".format, (0.0, 1.0)))


def distances(entries: Sequence[Entry]) -> Section:
    """Other distances than JSD, beside their floors."""
    return Section("distances", tables=table_of_events("Distances", entries, _distance_rows))


def _probed(entries: Sequence[Entry], key: str, probe: str, axis: Axis) -> Section:
    """A reading of unlearned tasks on this model and on the retrained one, over the stream."""

    def rows(event: Event) -> Iterator[Row]:
        for task, value in (event.get(key) or {}).items():
            yield {
                "unlearned task": text(int(task)),
                axis.label: number(value, axis.words),
                f"{axis.label}, retrained model": number(of_task(f"{key}_reference", int(task))(event), axis.words),
            }

    charts: list[Chart] = []
    for entry in entries:
        series = series_of(
            entry,
            ("here", "this model", mean_of(key)),
            ("retrained", "retrained model", mean_of(f"{key}_reference")),
        )
        charts += lines(entry, probe, series, replace(axis, label=f"mean {axis.label}"))
    return Section(key, charts, table_of_events(probe.capitalize(), entries, rows))


def _jsd_rows(event: Event) -> Iterator[Row]:
    head = number(mean_of("unlearned_accuracy")(event), percent)
    retrained = number(event.get("reference_unlearned_accuracy"), percent)
    for probe, value, floors in _beside_floors(event.get("jsd") or {}):
        by_task = (event.get("jsd_by_task") or {}).get(probe) or {}
        told = "; ".join(f"task {task}: {bits(value)}" for task, value in sorted(by_task.items()) if value is not None)
        yield {
            "probe": text(probe),
            "JSD (bit)": number(value, bits),
            **_floor_cells(value, *floors),
            "old head": head,
            "old head, retrained model": retrained,
            "reading": text(MISSING if value is None else jsd_reading(value, *floors)[1]),
            "by task": text(told or MISSING),
        }


def _distance_rows(event: Event) -> Iterator[Row]:
    for name, value, floors in _beside_floors(event.get("distances") or {}):
        yield {"distance": text(name), "value": number(value, bits), **_floor_cells(value, *floors)}


def _floor_cells(value: float | None, order: float | None, seed: float | None) -> Row:
    return {
        "floor: order": number(order, bits),
        "value / order floor": number(ratio_of(value, order), times),
        "floor: seed": number(seed, bits),
    }


def _beside_floors(
    found: Mapping[str, float | None],
) -> Iterator[tuple[str, float | None, tuple[float | None, float | None]]]:
    """(name, value, floors by order and by seed) of every distance; floors that were not measured are None."""
    for name in sorted(filter(is_distance, found)):
        yield name, found[name], (found.get(f"{name}_floor_order"), found.get(f"{name}_floor_seed"))
