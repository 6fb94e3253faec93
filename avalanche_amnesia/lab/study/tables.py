"""Tables and figures of a study: CSV of all runs, means over seeds, a figure per experiment, JSON per seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

import yaml
from matplotlib.figure import Figure

from avalanche_amnesia.evaluation.figures import COLOURS, as_png, house_style, new_figure
from avalanche_amnesia.evaluation.resolution import RESOLUTION, distance_in_words, two_digits
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE
from avalanche_amnesia.lab.report.measures import MEANINGS, MEASURES
from avalanche_amnesia.lab.report.reading import OF_STUDY, Moment, flat, grouped, read_run, seedless, spread
from avalanche_amnesia.lab.report.tables import csv_text
from avalanche_amnesia.lab.report.verdicts import claim_of
from avalanche_amnesia.lab.report.wording import MISSING, percent, points, unitless
from avalanche_amnesia.lab.study.experiment import SETTINGS, slug
from avalanche_amnesia.saving.files import replace_file

_NAME_WIDTH = 28
"""Maximum number of letters per line in the labels of a figure."""
_LEAST = 0.05
"""Minimum range of accuracy in a panel."""


@dataclass(frozen=True)
class Row:
    """A finished run as a table row: names, claim, final measures, settings, and numbers after each task."""

    experiment: str
    method: str
    scenario: str
    seed: int
    claim: str
    values: Mapping[str, float | None]
    settings: Mapping[str, Any]
    after: Sequence[Mapping[str, Any]]
    source: str = ""


def read_rows(folder: Path) -> list[Row]:
    """Return a table row per finished run in a folder, or in a JSON file written by :func:`write_tables`."""
    if folder.is_file():
        try:
            runs = json.loads(folder.read_text())
            return [_row(run["settings"], run["claim"], run["after"], str(folder)) for run in runs]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder} holds no results of a seed, as amnesia report --tables writes them: {error!r}"
            ) from error
    places = sorted(file.parent for file in folder.rglob(SETTINGS) if (file.parent / RUN_FILE).is_file())
    read = [(yaml.safe_load((place / SETTINGS).read_text()), read_run(place)) for place in places]
    logged = [(settings, claim_of([run]), list(map(_after, run.moments))) for settings, run in read if run.moments]
    if not logged:
        raise ValueError(
            f"{folder} holds no results of amnesia run or amnesia sweep ({SETTINGS}, {RUN_FILE}); logs of a "
            "script have a page, by amnesia report without --tables, but no tables"
        )
    return [_row(*run, str(folder)) for run in logged]


def _row(settings: Mapping[str, Any], claim: str, after: Sequence[Mapping[str, Any]], source: str) -> Row:
    names = settings["method"]["name"], settings["scenario"]["name"], settings["seed"]
    values = {key: after[-1]["measures"].get(key) for key in MEASURES}
    return Row(settings["experiment"], *names, claim, values, settings, after, source)


def _after(moment: Moment) -> dict[str, Any]:
    """Return the tasks, accuracies and measures of an evaluation between two tasks as plain values."""
    return {
        "task": moment.task,
        "remaining": moment.remaining,
        "unlearned": moment.unlearned,
        "accuracy": moment.accuracy,
        "measures": {key: measure.of(moment) for key, measure in MEASURES.items()},
    }


def as_markdown(rows: Sequence[Row]) -> str:
    """Return Markdown tables of means ± standard deviations over the seeds, one per experiment and scenario.

    If an experiment has several scenarios, two tables with a column per scenario come first: accuracy and JSD.
    """
    lines: list[str] = []
    for experiment, of_experiment in grouped(rows, lambda row: row.experiment).items():
        lines += [f"# {experiment}", "", _setup(of_experiment[0].settings), ""]
        scenarios = grouped(of_experiment, lambda row: row.scenario)
        for name in ("remaining", "ratio") if len(scenarios) > 1 else ():
            lines += [f"## All scenarios: {MEASURES[name].title}", ""]
            body = [
                [method, *(_cell([row for row in mine if row.scenario == one], name) for one in scenarios)]
                for method, mine in grouped(of_experiment, lambda row: row.method).items()
            ]
            lines += _markdown(["method", *scenarios], body)
        for scenario, of_scenario in scenarios.items():
            lines += [f"## {scenario}", ""]
            body = []
            for method, mine in grouped(of_scenario, lambda row: row.method).items():
                seeds = ", ".join(str(row.seed) for row in sorted(mine, key=lambda row: row.seed))
                claims = ", ".join(dict.fromkeys(row.claim or MISSING for row in mine))
                body.append([method, seeds, claims, *(_cell(mine, name) for name in MEASURES)])
            lines += _markdown(["method", "seeds", "claim", *(m.title for m in MEASURES.values())], body)
    sources = grouped(rows, lambda row: row.source)
    for source, mine in sources.items() if len(sources) > 1 else ():
        seeds = ", ".join(map(str, sorted({row.seed for row in mine})))
        lines += [f"From {source}: {'; '.join(grouped(mine, lambda row: row.method))}; seeds {seeds}.", ""]
    lines += ["Means ± standard deviations over the seeds, at the end of the stream.", ""]
    lines += [f"* *{MEASURES[key].title}*: {meaning}" for key, meaning in MEANINGS.items()]
    lines += ["* *claim*: exact: equal to the retrained model to the bit, by construction; approximate: see the rest;"]
    lines += ["  none: nothing was asked for, or the method obeys no request"]
    return "\n".join(lines) + "\n"


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with the text of all cells escaped."""
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in cells] for cells in (head, *body))
    first, *rows = (f"| {' | '.join(cells)} |" for cells in escaped)
    return [first, "|---" * len(head) + "|", *rows, ""]


@house_style
def figure(rows: Sequence[Row]) -> Figure:
    """Plot accuracy of remaining tasks (left) and JSD to the retrained model (right): mean and range over seeds."""
    scenarios = grouped(rows, lambda row: row.scenario)
    methods = list(grouped(rows, lambda row: row.method))
    picture = new_figure(60 + len(scenarios) * (50 + 20 * len(methods)), width=650)
    axes = picture.subplots(len(scenarios), 2, squeeze=False, sharey=True)
    for (scenario, mine), (left, right) in zip(scenarios.items(), axes, strict=True):
        of_methods = grouped(mine, lambda row: row.method)
        for ax, name in ((left, "remaining"), (right, "ratio")):
            found = [spread(_drawn(row, name) for row in of_methods.get(method, ())) for method in methods]
            largest = max((value.high for value in found if value), default=None)
            if largest is not None:
                places, values = zip(*((y, value) for y, value in enumerate(found) if value), strict=True)
                reach = [[v.mean - v.low for v in values], [v.high - v.mean for v in values]]
                look = {"fmt": "o", "color": COLOURS["here"], "ecolor": (COLOURS["here"], 0.35), "elinewidth": 5}
                ax.errorbar([value.mean for value in values], places, xerr=reach, clip_on=False, **look)
                ax.grid(axis="y")
            for place, value in enumerate(found):
                if value is None:
                    at = {"xycoords": ("axes fraction", "data"), "va": "center", "color": COLOURS["quiet"]}
                    ax.annotate("not measured", (0.05, place), backgroundcolor=COLOURS["page"], fontsize="small", **at)
            ax.set(title=scenario, ylim=(len(methods) - 0.5, -0.5))
        left.set_yticks(range(len(methods)), [fill(method, _NAME_WIDTH) for method in methods])
        left.set_xlabel("accuracy of remaining tasks")
        low, high = left.dataLim.intervalx  # (inf, -inf) without data
        if 0 <= high - low < _LEAST:  # small differences must not fill the panel
            right_end = min((low + high + _LEAST) / 2, 1.0)
            left.set_xlim(right_end - _LEAST, right_end)
        left.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        right.set_xlabel("JSD in units of its order floor")
        if largest is not None:
            if largest > 10:
                right.set_xscale("symlog", linthresh=1)
            right.xaxis.set_major_formatter("{x:g}")
            right.set_xlim(-0.2, 1.3 * max(1.0, largest))
            right.axvline(1, color=COLOURS["quiet"], linewidth=1, linestyle=":")
    return picture


def _drawn(row: Row, name: str) -> float | None:
    """Return the value of a measure that the figure shows for a row; 0 for the ratio of a JSD below detection."""
    return 0.0 if name == "ratio" and _below_detection(row) else row.values[name]


def _below_detection(row: Row) -> bool:
    jsd = row.values.get("jsd")
    return jsd is not None and jsd < RESOLUTION


def _check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError if the rows, of one or more result folders, cannot share a table.

    Rows of an experiment need the same stream, network and budget; rows of one method and scenario need the same
    settings and distinct seeds. Settings missing in one of two rows (from another version) are not compared.
    """
    seen: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        settings = _as_compared(row)
        for what, begins in (((row.experiment,), OF_STUDY), ((row.experiment, row.method, row.scenario), ("",))):
            other = seen.setdefault(what, row)
            theirs = _as_compared(other)
            differ = [k for k in settings if k in theirs and k.startswith(begins) and settings[k] != theirs[k]]
            if differ:
                key = differ[0]
                raise ValueError(
                    f"{', '.join(what)} in {other.source} has {key}={theirs[key]}, and in {row.source} "
                    f"{key}={settings[key]}: rows of different studies are no rows of one table; report them apart"
                )
        names = (row.experiment, row.method, row.scenario, row.seed)
        if names in seen:
            raise ValueError(
                f"{', '.join(map(str, names))} is in {seen[names].source} and in {row.source}: give it once"
            )
        seen[names] = row


def _as_compared(row: Row) -> dict[str, Any]:
    """Return the settings of a row with dotted names and without the seed; all keys are strings, as in JSON."""
    return flat(seedless(json.loads(json.dumps(row.settings))))


def write_tables(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write ``results.csv``, ``results.md`` and, for each experiment, a figure and a JSON file per seed."""
    _check_rows(rows)
    out.mkdir(parents=True, exist_ok=True)
    head = ["experiment", "method", "scenario", "seed", "claim", *MEASURES]
    cells = ([row.experiment, row.method, row.scenario, row.seed, row.claim, *row.values.values()] for row in rows)
    contents = {"results.csv": csv_text([head, *cells]).encode(), "results.md": as_markdown(rows).encode()}
    for experiment, mine in grouped(rows, lambda row: row.experiment).items():
        contents[f"{slug(experiment)}.png"] = as_png(figure(mine))
        for seed, of_seed in sorted(grouped(mine, lambda row: row.seed).items()):
            runs = [{"claim": row.claim, "settings": row.settings, "after": row.after} for row in of_seed]
            lines = ",\n".join(json.dumps(run, ensure_ascii=False) for run in runs)
            contents[f"{slug(experiment)}_seed{seed}.json"] = f"[\n{lines}\n]\n".encode()
    for name, content in contents.items():
        replace_file(out / name, content)
    return [out / name for name in contents]


def _cell(rows: Sequence[Row], name: str) -> str:
    """Return mean and standard deviation of a measure over seeds as text, and the number of seeds if some lack it."""
    words = MEASURES[name].words
    found = [value for row in rows if (value := row.values[name]) is not None]
    if not found:
        return distance_in_words(0.0) if name == "ratio" and rows and all(map(_below_detection, rows)) else MISSING
    some = f" ({len(found)} of {len(rows)})" if len(found) < len(rows) else ""
    mean, deviation = fmean(found), stdev(found) if len(found) > 1 else None
    if words in (percent, points):
        return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}") + some
    told = unitless(words(mean)) + ("" if deviation is None or mean < RESOLUTION else f" ± {two_digits(deviation)}")
    return told + some


def _setup(settings: Mapping[str, Any]) -> str:
    """Return the stream, network and training settings of a study as one sentence."""
    stream, training = settings["stream"], settings["training"]
    images = "all training images" if stream["n_train"] is None else f"{stream['n_train']:,} training images"
    options = "".join(f", {name}: {value}" for name, value in stream["options"].items())
    network = settings["network"]["name"]
    widths = f" {'-'.join(map(str, settings['network']['widths']))}" if network == "MLP" else ""
    return (
        f"{stream['name']}, {stream['n_tasks']} tasks{options}, {images}; {network}{widths}; "
        f"{training['epochs']} epochs of mini-batches of {training['batch_size']} per task."
    )
