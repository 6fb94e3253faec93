"""Sections on what is left of the unlearned tasks, beside a model that never saw them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from avalanche_amnesia.lab.report.charts import Axis
from avalanche_amnesia.lab.report.evidence import jsd_reading
from avalanche_amnesia.lab.report.measures import Reading, jsd_name, jsd_of
from avalanche_amnesia.lab.report.reading import Entry, Moment, number
from avalanche_amnesia.lab.report.sections.section import Row, Section, lines, table_of_moments
from avalanche_amnesia.lab.report.tables import number as cell
from avalanche_amnesia.lab.report.tables import text
from avalanche_amnesia.lab.report.wording import MISSING, bits, percent, times

_HEAD = "UnlearnedAccuracy"
_BESIDE = ("_tasks", "_floor_order", "_floor_seed", "_ratio_order")


def jsd(entries: Sequence[Entry]) -> Section:
    """JSD to the retrained model, beside its floors."""
    probes = {"JSD_own": ", own masks", "JSD_remaining": ", masks of remaining tasks", "JSD_none": ", no masks"}
    charts = lines(
        entries,
        lambda entry: f"JSD{probes.get(jsd_name(entry.first.last) or '', '')}",
        Axis("JSD (bit)", bits, bits),
        ("here", "JSD to the retrained model", jsd_of()),
        ("order", "floor: another data order", jsd_of("_floor_order")),
        ("seed", "floor: another seed", jsd_of("_floor_seed")),
    )
    return Section(
        "jsd",
        "How far is it from a model that never saw the tasks?",
        (
            "JSD, the Jensen–Shannon divergence, compares the features of the forgotten tasks' data in this model and "
            "in the retrained one: 0 bit is equal, 1 bit is the most there can be. Two retrained models differ too: "
            "that is the floor, for another data order and for another seed. Read JSD in units of the order floor: 1 × "
            "is as far as retraining in another order. The seed's floor is wider, and flatters.",
            "A known limitation: small residues are invisible to JSD. In a test on permuted images (five seeds) a "
            "fifth of a forgotten update, put back, left JSD at its order floor (1.00 ×), and the old head near the "
            "retrained model's (0.9 points above), while a head fitted to five samples per class read 34 points more "
            "than there. Features of two networks have two scales: compare a strategy with its floors, not with "
            "another strategy.",
        ),
        "JSD against its floors",
        charts,
        table_of_moments("JSD", entries, _jsd_rows),
    )


def distances(entries: Sequence[Entry]) -> Section:
    """Other distances than JSD, beside their floors."""
    return Section(
        "distances",
        "Other distances",
        ("Distances between the same features as JSD, each with its own floors where they were measured.",),
        "other distances",
        tables=table_of_moments("Distances", entries, _distance_rows),
    )


def reading(entries: Sequence[Entry], shown: Reading) -> Section:
    """A reading of unlearned tasks on this model and on the retrained one, over the stream."""
    axis, beside = shown.axis, f"{shown.metric}_reference"

    def rows(moment: Moment) -> Iterator[Row]:
        for task, value in moment.by_task(shown.metric).items():
            yield {
                "unlearned task": text(task),
                axis.label: cell(value, axis.words),
                f"{axis.label}, retrained model": cell(moment.number(beside, task), axis.words),
            }

    charts = lines(
        entries,
        shown.check,
        replace(axis, label=f"mean {axis.label}"),
        ("here", "this model", number(shown.metric)),
        ("retrained", "retrained model", number(beside)),
        ("chance", "chance", number(f"{shown.metric}_chance")),
    )
    tables = table_of_moments(shown.check.capitalize(), entries, rows)
    return Section(shown.key or "", shown.title, (shown.lead,), shown.check, charts, tables)


def _jsd_rows(moment: Moment) -> Iterator[Row]:
    for name in _distances(moment, "JSD_"):
        value, order, seed = (moment.number(f"{name}{suffix}") for suffix in ("", "_floor_order", "_floor_seed"))
        by_task = "; ".join(f"task {task}: {bits(one)}" for task, one in sorted(moment.by_task(name).items()))
        yield {
            "probe": text(name),
            "JSD (bit)": cell(value, bits),
            **_floor_cells(moment, name),
            "old head": cell(moment.number(_HEAD), percent),
            "old head, retrained model": cell(moment.number(f"{_HEAD}_reference"), percent),
            "reading": text(MISSING if value is None else jsd_reading(value, order, seed)[1]),
            "by task": text(by_task or MISSING),
        }


def _distance_rows(moment: Moment) -> Iterator[Row]:
    for name in _distances(moment, "Euclidean_", "Cosine_", "CKA_"):
        yield {
            "distance": text(name),
            "value": cell(moment.number(name), bits),
            **_floor_cells(moment, name),
        }


def _floor_cells(moment: Moment, name: str) -> Row:
    return {
        "floor: order": cell(moment.number(f"{name}_floor_order"), bits),
        "value / order floor": cell(moment.number(f"{name}_ratio_order"), times),
        "floor: seed": cell(moment.number(f"{name}_floor_seed"), bits),
    }


def _distances(moment: Moment, *kinds: str) -> list[str]:
    """Names of distances, and not of their floors and ratios."""
    return sorted(name for name in moment.numbers if name.startswith(kinds) and not name.endswith(_BESIDE))
