"""Sections of the page: which numbers each shows, as charts and as a table; none where nothing was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from avalanche_amnesia.logging.report.answers import claim, jsd_name, jsd_of, jsd_reading
from avalanche_amnesia.logging.report.charts import (
    Chart,
    Series,
    dot_chart,
    line_chart,
    matrix,
    owner_bars,
    timeline,
)
from avalanche_amnesia.logging.report.prose import LEADS, TITLES
from avalanche_amnesia.logging.report.reading import Entry, Event, Results, Spread, flat, mean_of, of_task, spread
from avalanche_amnesia.logging.report.tables import Table, TableCell, mean, number, text
from avalanche_amnesia.logging.report.wording import bits, over_seeds, percent, points, seconds, share, tasks


@dataclass(frozen=True)
class Section:
    """Part of the page.

    Attributes:
        key: its anchor, and its place in the prose.
        charts: side by side.
        tables: behind them.
    """

    key: str
    charts: Sequence[Chart] = field(default_factory=list)
    tables: Sequence[Table] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Title of the section."""
        return TITLES[self.key]

    @property
    def lead(self) -> list[str]:
        """Reading instructions, a paragraph each."""
        return LEADS[self.key].split("\n\n") if LEADS[self.key] else []


def summary_table(entries: Sequence[Entry]) -> Table:
    """One row per strategy at the end of its stream: means over seeds."""
    rows = []
    for entry in entries:
        unlearn = spread(timing["unlearn"] for run in entry.runs for timing in run.timings)
        retrain = spread(timing["retrain"] for run in entry.runs for timing in run.timings)
        rows.append(
            [
                text(entry.name),
                text(len(entry.runs)),
                text(claim(entry)),
                mean(entry.spread(mean_of("accuracy")), percent),
                mean(entry.spread(_value("accuracy_difference")), points),
                mean(entry.spread(mean_of("unlearned_accuracy")), percent),
                mean(entry.spread(_value("reference_unlearned_accuracy")), percent),
                mean(entry.spread(jsd_of(entry, "")), bits),
                mean(entry.spread(jsd_of(entry, "_floor_order")), bits),
                mean(entry.spread(jsd_of(entry, "_floor_seed")), bits),
                mean(entry.spread(_value("capacity")), share),
                mean(unlearn, seconds),
                mean(retrain, seconds),
            ]
        )
    columns = (
        "strategy",
        "seeds",
        "claim",
        "accuracy on remaining tasks",
        "against never unlearning",
        "old head",
        "old head, retrained model",
        "JSD (bit)",
        "JSD floor: order",
        "JSD floor: seed",
        "free capacity",
        "time to unlearn",
        "time to retrain",
    )
    return Table("All strategies at the end of the stream", columns, rows)


def sections(groups: Sequence[Sequence[Results]], entries: Sequence[Entry]) -> list[Section]:
    """All sections with something in them, in the order of the page."""
    made = (
        _timeline(entries),
        _accuracy(entries),
        _old_head(entries),
        _jsd(entries),
        _relapse(entries),
        _membership(entries),
        _difference(entries),
        _transfer(entries),
        _capacity(entries),
        _owners(entries),
        _overlap(entries),
        _distances(entries),
        _cost(entries),
        _settings(groups),
    )
    return [section for section in made if section.charts or section.tables]


def not_measured(found: Sequence[Section]) -> list[str]:
    """Titles of what these runs did not measure."""
    there = {section.key for section in found}
    return [title for key, title in _MEASURED.items() if key not in there]


_MEASURED = {
    "old-head": "old heads",
    "jsd": "JSD against its floors",
    "relapse": "relapse",
    "membership": "membership inference",
    "difference": "accuracy difference",
    "transfer": "forgetting and backward transfer",
    "capacity": "capacity",
    "owners": "owners of units",
    "overlap": "overlap of masks",
    "distances": "other distances",
    "cost": "seconds",
}
_PROBES = {"JSD_own": ", own masks", "JSD_remaining": ", masks of remaining tasks"}
_PER_SEED = "one row per seed; numbers in full when copied"


def _timeline(entries: Sequence[Entry]) -> Section:
    told: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        gone = {task: event["task"] for event in entry.first.events for task in event.get("unlearned_now") or ()}
        told.setdefault((tuple(entry.after), tuple(gone.items())), []).append(entry)
    charts = []
    for entries_ in told.values():
        first = entries_[0]
        gone = {task: event["task"] for event in first.first.events for task in event.get("unlearned_now") or ()}
        title = "Tasks and requests" if len(told) == 1 else f"Tasks and requests: {', '.join(e.name for e in entries_)}"
        charts.append(timeline(title, first.after, gone))
    return Section(
        "timeline",
        charts,
    )


def _accuracy(entries: Sequence[Entry]) -> Section:
    charts, rows = [], []
    for entry in entries:
        labels = sorted({int(task) for run in entry.runs for event in run.events for task in _accuracies(event)})
        values, below, framed, details = {}, {}, [], {}
        for after in entry.after:
            for task in labels:
                found = entry.spread(_accuracy_of(task), after)
                if found is None:
                    continue
                place = (after, task)
                values[place] = found.mean
                words = f"after task {after}, task {task}: {over_seeds(found, percent)}"
                if entry.spread(of_task("unlearned_accuracy", task), after) is not None:
                    framed.append(place)
                    retrained = entry.spread(of_task("reference_unlearned", task), after)
                    chance = entry.spread(of_task("chance", task), after)
                    beside = [("retr.", retrained), ("chance", chance)]
                    below[place] = [f"{name} {100 * value.mean:.0f}" for name, value in beside if value]
                    words += " through its old head" + "".join(
                        f", {name} {over_seeds(value, percent)}"
                        for name, value in (("on the retrained model", retrained), ("chance", chance))
                        if value
                    )
                details[place] = words
        charts.append(
            matrix(
                f"{entry.name}: test accuracy (%)",
                entry.after,
                labels,
                values,
                x_label="tested on task",
                y_label="after task",
                words=lambda value: f"{100 * value:.0f}",
                below=below,
                framed=framed,
                details=details,
                legend=[("frame", "unlearned: read through its old head")],
            )
        )
        for run in entry.runs:
            for event in run.events:
                for task in labels:
                    value = _accuracies(event).get(str(task))
                    if value is not None:
                        rows.append(
                            [
                                text(entry.name),
                                text(run.seed),
                                text(event["task"]),
                                text(task),
                                text("unlearned" if str(task) in event.get("unlearned_accuracy", {}) else "remains"),
                                number(value, percent),
                                number(_retrained(event, task), percent),
                                number(of_task("full_accuracy", task)(event), percent),
                                number(of_task("chance", task)(event), percent),
                            ]
                        )
    columns = (
        "strategy",
        "seed",
        "after task",
        "tested on task",
        "status",
        "accuracy",
        "retrained model",
        "never unlearned",
        "chance",
    )
    return Section(
        "accuracy",
        charts,
        [Table(f"Accuracies ({_PER_SEED})", columns, rows)] if rows else [],
    )


def _old_head(entries: Sequence[Entry]) -> Section:
    names = {
        "here": "this model",
        "retrained": "retrained model, which never saw the task",
        "chance": "chance",
    }
    charts = []
    for entry in entries:
        rows = [
            (
                f"task {task}",
                _marks(
                    here=entry.spread(of_task("unlearned_accuracy", task)),
                    retrained=entry.spread(of_task("reference_unlearned", task)),
                    chance=entry.spread(of_task("chance", task)),
                ),
            )
            for task in entry.unlearned
        ]
        mean_marks = _marks(
            here=entry.spread(mean_of("unlearned_accuracy")),
            retrained=entry.spread(_value("reference_unlearned_accuracy")),
            chance=entry.spread(mean_of("chance", among="unlearned_accuracy")),
        )
        rows = [(words, marks) for words, marks in [*rows, ("mean", mean_marks)] if "here" in marks]
        if rows:
            charts.append(
                dot_chart(
                    f"{entry.name}: old heads",
                    rows,
                    names,
                    x_label="accuracy on the unlearned task",
                    words=percent,
                    axis_words=lambda value: f"{value:.0%}",
                    x_range=(0.0, 1.0),
                )
            )
    return Section("old-head", charts)


def _jsd(entries: Sequence[Entry]) -> Section:
    charts, rows = [], []
    for entry in entries:
        name = jsd_name(entry)
        series = _series(
            entry,
            ("here", "JSD to the retrained model", jsd_of(entry, "")),
            ("order", "floor: another data order", jsd_of(entry, "_floor_order")),
            ("seed", "floor: another seed", jsd_of(entry, "_floor_seed")),
        )
        if series and series[0].role == "here":
            charts.append(
                line_chart(
                    f"{entry.name}: JSD{_PROBES.get(name or '', '')}",
                    series,
                    x_label="after task",
                    y_label="JSD (bit)",
                    after=entry.after,
                    words=bits,
                    axis_words=bits,
                    requests=_requests(entry),
                    limit=_limit(series),
                )
            )
        for run in entry.runs:
            for event in run.events:
                found = event.get("jsd") or {}
                for probe in sorted(key for key in found if "_floor" not in key):
                    order, seed = found.get(f"{probe}_floor_order"), found.get(f"{probe}_floor_seed")
                    floors = [floor for floor in (order, seed) if floor is not None]
                    by_task = (event.get("jsd_by_task") or {}).get(probe) or {}
                    told = "; ".join(
                        f"task {task}: {bits(value)}" for task, value in sorted(by_task.items()) if value is not None
                    )
                    rows.append(
                        [
                            text(entry.name),
                            text(run.seed),
                            text(event["task"]),
                            text(probe),
                            number(found[probe], bits),
                            number(order, bits),
                            number(seed, bits),
                            text("–" if found[probe] is None else jsd_reading(found[probe], floors)[1]),
                            text(told or "–"),
                        ]
                    )
    columns = (
        "strategy",
        "seed",
        "after task",
        "probe",
        "JSD (bit)",
        "floor: order",
        "floor: seed",
        "reading",
        "by task",
    )
    return Section(
        "jsd",
        charts,
        [Table(f"JSD ({_PER_SEED})", columns, rows)] if rows else [],
    )


def _relapse(entries: Sequence[Entry]) -> Section:
    return _probed(
        entries,
        "relapse",
        "linear probe",
        "accuracy",
        percent,
        lambda value: f"{value:.0%}",
    )


def _membership(entries: Sequence[Entry]) -> Section:
    return _probed(
        entries,
        "membership",
        "membership",
        "AUC",
        share,
        lambda value: f"{value:g}",
    )


def _probed(
    entries: Sequence[Entry],
    key: str,
    probe: str,
    unit: str,
    words: Callable[[float], str],
    axis_words: Callable[[float], str],
) -> Section:
    """A reading of unlearned tasks on this model and on the retrained one, over the stream."""
    charts, rows = [], []
    for entry in entries:
        series = _series(
            entry,
            ("here", "this model", mean_of(key)),
            ("retrained", "retrained model", mean_of(f"{key}_reference")),
        )
        if series and series[0].role == "here":
            charts.append(
                line_chart(
                    f"{entry.name}: {probe}",
                    series,
                    x_label="after task",
                    y_label=f"mean {unit}",
                    after=entry.after,
                    words=words,
                    axis_words=axis_words,
                    y_range=(0.0, 1.0),
                    requests=_requests(entry),
                )
            )
        for run in entry.runs:
            for event in run.events:
                for task, value in (event.get(key) or {}).items():
                    reference = (event.get(f"{key}_reference") or {}).get(task)
                    rows.append(
                        [
                            text(entry.name),
                            text(run.seed),
                            text(event["task"]),
                            text(int(task)),
                            number(value, words),
                            number(reference, words),
                        ]
                    )
    columns = ("strategy", "seed", "after task", "unlearned task", unit, f"{unit}, retrained model")
    return Section(key, charts, [Table(f"{probe.capitalize()} ({_PER_SEED})", columns, rows)] if rows else [])


def _difference(entries: Sequence[Entry]) -> Section:
    charts, rows = [], []
    keys = ("accuracy_difference", "accuracy_difference_control")
    reach = [event.get(key) or 0.0 for entry in entries for run in entry.runs for event in run.events for key in keys]
    for entry in entries:
        series = _series(
            entry,
            ("here", "against the model that never unlearned", _value("accuracy_difference")),
            ("never", "control: heads fitted anew alone", _value("accuracy_difference_control")),
        )
        if series and series[0].role == "here":
            charts.append(
                line_chart(
                    f"{entry.name}: accuracy difference",
                    series,
                    x_label="after task",
                    y_label="points of accuracy",
                    after=entry.after,
                    words=points,
                    axis_words=lambda value: f"{100 * value:+.3g}" if value else "0",
                    y_range=(min(reach), max(reach)),
                    requests=_requests(entry),
                )
            )
        for run in entry.runs:
            for event in run.events:
                if event.get("accuracy_difference") is not None:
                    rows.append(
                        [
                            text(entry.name),
                            text(run.seed),
                            text(event["task"]),
                            number(event["accuracy_difference"], points),
                            number(event.get("accuracy_difference_control"), points),
                        ]
                    )
    return Section(
        "difference",
        charts,
        [
            Table(
                f"Accuracy difference ({_PER_SEED})",
                ("strategy", "seed", "after task", "AD", "AD, control"),
                rows,
            )
        ]
        if rows
        else [],
    )


def _transfer(entries: Sequence[Entry]) -> Section:
    rows = [
        [
            text(entry.name),
            text(run.seed),
            number(run.last.get("average_forgetting"), points),
            number(run.last.get("backward_transfer"), points),
        ]
        for entry in entries
        for run in entry.runs
        if run.last.get("average_forgetting") is not None or run.last.get("backward_transfer") is not None
    ]
    return Section(
        "transfer",
        [],
        [
            Table(
                f"Remaining tasks ({_PER_SEED})",
                ("strategy", "seed", "average forgetting", "backward transfer"),
                rows,
            )
        ]
        if rows
        else [],
    )


def _capacity(entries: Sequence[Entry]) -> Section:
    charts, rows = [], []
    for entry in entries:
        saw: list[tuple[float, Spread]] = []
        for place, after in enumerate(entry.after):
            before = entry.spread(_value("capacity_before"), after) if place in _requests(entry) else None
            now = entry.spread(_value("capacity"), after)
            if before is not None:
                saw.append((place - 0.12, before))
            if now is not None:
                saw.append((place + 0.12 if before is not None and place < len(entry.after) - 1 else place, now))
        if saw:
            charts.append(
                line_chart(
                    f"{entry.name}: free capacity",
                    [Series("here", "before and after the requests of each task", saw)],
                    x_label="after task",
                    y_label="capacity (1: all free)",
                    after=entry.after,
                    words=share,
                    axis_words=lambda value: f"{value:g}",
                    y_range=(0.0, 1.0),
                    requests=_requests(entry),
                )
            )
        for run in entry.runs:
            for event in run.events:
                if event.get("capacity") is not None:
                    rows.append(
                        [
                            text(entry.name),
                            text(run.seed),
                            text(event["task"]),
                            text(", ".join(map(str, event.get("unlearned_now") or ())) or "–"),
                            number(event.get("capacity_before"), share),
                            number(event["capacity"], share),
                            number(event.get("trajectory_bytes"), lambda value: f"{value / 1024:,.0f} KiB"),
                        ]
                    )
    columns = ("strategy", "seed", "after task", "unlearned now", "before requests", "after requests", "trajectory")
    return Section(
        "capacity",
        charts,
        [Table(f"Capacity ({_PER_SEED})", columns, rows)] if rows else [],
    )


def _owners(entries: Sequence[Entry]) -> Section:
    charts, rows = [], []
    for entry in entries:
        for event in entry.first.events:
            if not event.get("unlearned_now") or not event.get("owners"):
                continue
            layers: dict[str, dict[str, dict[str, float]]] = {}
            for layer, owners in event["owners"].items():
                moments = {"before": (event.get("owners_before") or {}).get(layer), "after": owners}
                layers[layer] = {moment: _named(of) for moment, of in moments.items() if of}
                for moment, of in layers[layer].items():
                    rows += [
                        [
                            text(entry.name),
                            text(event["task"]),
                            text(layer),
                            text(moment),
                            text(owner),
                            number(value, percent),
                        ]
                        for owner, value in of.items()
                    ]
            named = {owner for moments in layers.values() for of in moments.values() for owner in of}
            tasks_ = sorted((owner for owner in named if owner.startswith("task")), key=lambda owner: int(owner[5:]))
            roles = {owner: f"task{int(owner[5:]) % 6}" for owner in tasks_}
            roles |= {owner: owner for owner in ("shared", "free") if owner in named}
            title = f"{entry.name}: owners, request after {event['task']}"
            charts.append(owner_bars(title, layers, percent, roles))
    return Section(
        "owners",
        charts,
        [Table("Owners", ("strategy", "after task", "layer", "moment", "owner", "share"), rows)] if rows else [],
    )


def _overlap(entries: Sequence[Entry]) -> Section:
    charts = []
    for entry in entries:
        event = next(
            (event for event in reversed(entry.first.events) if (event.get("overlap") or {}).get("tasks")), None
        )
        if event is None:
            continue
        labels = event["overlap"]["tasks"]
        values = {
            (row, column): value
            for row, shares in zip(labels, event["overlap"]["shares"], strict=True)
            for column, value in zip(labels, shares, strict=True)
            if value is not None
        }
        charts.append(
            matrix(
                f"{entry.name}: overlap (%)",
                labels,
                labels,
                values,
                x_label="with task",
                y_label="task",
                words=lambda value: f"{100 * value:.0f}",
            )
        )
    return Section(
        "overlap",
        charts,
    )


def _distances(entries: Sequence[Entry]) -> Section:
    rows = []
    for entry in entries:
        for run in entry.runs:
            for event in run.events:
                found = event.get("distances") or {}
                for name in sorted(key for key in found if "_floor" not in key):
                    floors = (found.get(f"{name}_floor_{floor}") for floor in ("order", "seed"))
                    named_by = (entry.name, run.seed, event["task"], name)
                    rows.append([*map(text, named_by), *(number(value, bits) for value in (found[name], *floors))])
    columns = ("strategy", "seed", "after task", "distance", "value", "floor: order", "floor: seed")
    return Section("distances", [], [Table(f"Distances ({_PER_SEED})", columns, rows)] if rows else [])


def _cost(entries: Sequence[Entry]) -> Section:
    names = {"here": "to unlearn", "retrained": "to retrain without the tasks"}
    marks, rows = [], []
    for entry in entries:
        moments = dict.fromkeys(timing["after_task"] for run in entry.runs for timing in run.timings)
        for after in moments:
            at = [timing for run in entry.runs for timing in run.timings if timing["after_task"] == after]
            both = _marks(
                here=spread(timing["unlearn"] for timing in at if timing["unlearn"] > 0),
                retrained=spread(timing["retrain"] for timing in at if timing["retrain"] > 0),
            )
            if both:
                marks.append((f"{entry.name}, request after task {after}", both))
        for run in entry.runs:
            for timing in run.timings:
                times = timing["retrain"] / timing["unlearn"] if timing["unlearn"] else None
                rows.append(
                    [
                        text(entry.name),
                        text(run.seed),
                        text(timing["after_task"]),
                        number(timing["unlearn"], seconds),
                        number(timing["retrain"], seconds),
                        number(times, lambda value: f"{value:,.0f}×"),
                    ]
                )
    columns = ("strategy", "seed", "after task", "to unlearn (s)", "to retrain (s)", "times faster")
    return Section(
        "cost",
        [
            dot_chart(
                "Time to unlearn and to retrain",
                marks,
                names,
                x_label="seconds (logarithmic)",
                words=seconds,
                axis_words=lambda value: f"{value:g}",
                logarithmic=True,
            )
        ]
        if marks
        else [],
        [Table(f"Seconds ({_PER_SEED})", columns, rows)] if rows else [],
    )


def _settings(groups: Sequence[Sequence[Results]]) -> Section:
    runs = [results for group in groups for results in group]
    rows: list[list[TableCell]] = []
    for name in dict.fromkeys(name for results in runs for name in flat(results.settings)):
        rows.append([text(name), *(text(_told(flat(results.settings).get(name))) for results in runs)])
    versions: list[list[TableCell]] = []
    for name in dict.fromkeys(name for results in runs for name in results.versions):
        versions.append([text(name), *(text(results.versions.get(name, "–")) for results in runs)])
    folders = [results.folder for results in runs]
    return Section(
        "settings",
        [],
        [Table("Settings", ("setting", *folders), rows), Table("Versions", ("package", *folders), versions)],
    )


def _accuracies(event: Event) -> dict[str, float]:
    """Accuracy of every task that was read: remaining ones, and unlearned ones through their old heads."""
    return {**(event.get("accuracy") or {}), **(event.get("unlearned_accuracy") or {})}


def _accuracy_of(task: int) -> Callable[[Event], float | None]:
    return lambda event: _accuracies(event).get(str(task))


def _retrained(event: Event, task: int) -> float | None:
    key = "reference_unlearned" if str(task) in (event.get("unlearned_accuracy") or {}) else "reference_accuracy"
    return of_task(key, task)(event)


def _value(key: str) -> Callable[[Event], float | None]:
    return lambda event: event.get(key)


def _marks(**found: Spread | None) -> dict[str, Spread]:
    return {role: value for role, value in found.items() if value is not None}


def _series(entry: Entry, *wanted: tuple[str, str, Callable[[Event], float | None]]) -> list[Series]:
    """Those of several series that have numbers."""
    found = []
    for role, name, get in wanted:
        values = ((float(place), entry.spread(get, after)) for place, after in enumerate(entry.after))
        there = [(place, value) for place, value in values if value is not None]
        if there:
            found.append(Series(role, name, there))
    return found


def _limit(series: Sequence[Series]) -> list[tuple[float, float]]:
    """The higher floor of a JSD wherever one was measured."""
    floors: dict[float, float] = {}
    for each in series:
        if each.role in ("order", "seed"):
            for place, value in each.points:
                floors[place] = max(value.mean, floors.get(place, 0.0))
    return sorted(floors.items())


def _requests(entry: Entry) -> list[int]:
    return [place for place, event in enumerate(entry.first.events) if event.get("unlearned_now")]


def _named(owners: dict[str, float]) -> dict[str, float]:
    """Shares of a layer under the owners' names: tasks in order, then shared and free."""
    of_tasks = sorted((int(owner), value) for owner, value in owners.items() if owner.isdigit())
    named = {f"task {task}": value for task, value in of_tasks}
    return named | {owner: owners[owner] for owner in ("shared", "free") if owners.get(owner)}


def _told(value: object) -> str:
    if isinstance(value, dict):  # requests
        return "; ".join(f"{tasks(gone)} after task {after}" for after, gone in value.items())
    return "–" if value is None else str(value)
