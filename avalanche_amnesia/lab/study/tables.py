"""Tables and figures of a study: CSV of all runs, means over seeds, a figure per experiment, JSON per seed."""

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

from avalanche_amnesia.evaluation.figures import COLOURS, house_style, new_figure
from avalanche_amnesia.evaluation.resolution import RESOLUTION, distance_in_words, two_digits
from avalanche_amnesia.lab.report import reading
from avalanche_amnesia.lab.report.measures import MEANINGS, MEASURES
from avalanche_amnesia.lab.report.reading import Evaluation, Run, drop_seeds, entries, flatten, group_by, spread
from avalanche_amnesia.lab.report.tables import csv_text
from avalanche_amnesia.lab.report.verdicts import claim_of
from avalanche_amnesia.lab.report.wording import MISSING, percent, points, without_unit
from avalanche_amnesia.lab.study.experiment import slug
from avalanche_amnesia.saving.files import replace_file


def read_study(folder: Path) -> list[Run]:
    """Return the finished runs of ``amnesia run`` and ``amnesia sweep`` in a folder."""
    found = [run for run in reading.read_runs(folder) if {"experiment", "scenario"} <= run.settings.keys()]
    if stopped := [str(run.folder) for run in found if not run.ended]:
        warnings.warn(f"these runs did not end and are left out, do them again: {', '.join(stopped)}", stacklevel=2)
    if not (runs := [run for run in found if run.ended]):
        raise ValueError(f"{folder} holds no results of amnesia run or sweep: use amnesia report without --tables")
    return runs


def _moment_values(moment: Evaluation) -> dict[str, Any]:
    """Return an evaluation's tasks, accuracies and metrics as plain values, for JSON."""
    values = {name: getattr(moment, name) for name in ("task", "remaining", "unlearned", "accuracy")}
    return values | {"measures": {key: measure.get(moment) for key, measure in MEASURES.items()}}


def _experiment_name(run: Run) -> str:
    return str(run.settings["experiment"])


def _scenario_name(run: Run) -> str:
    return str(run.settings["scenario"]["name"])


def as_markdown(runs: Sequence[Run]) -> str:
    """Return Markdown tables of means ± standard deviations over the seeds, one per experiment and scenario.

    If an experiment has several scenarios, two tables with a column per scenario come first: accuracy and JSD.
    """
    lines: list[str] = []
    for experiment, of_experiment in group_by(runs, _experiment_name).items():
        lines += [f"# {experiment}", "", _setup_text(of_experiment[0].settings), ""]
        scenarios = group_by(of_experiment, _scenario_name)
        for name in ("remaining", "ratio") if len(scenarios) > 1 else ():
            lines += [f"## All scenarios: {MEASURES[name].title}", ""]
            body = [
                [method, *(_mean_text([run for run in mine if _scenario_name(run) == one], name) for one in scenarios)]
                for method, mine in group_by(of_experiment, lambda run: run.name).items()
            ]
            lines += _markdown(["method", *scenarios], body)
        for scenario, of_scenario in scenarios.items():
            lines += [f"## {scenario}", ""]
            body = []
            for method, mine in group_by(of_scenario, lambda run: run.name).items():
                seeds = ", ".join(map(str, sorted(run.seed for run in mine)))
                claims = ", ".join(dict.fromkeys(claim_of([run]) or MISSING for run in mine))
                body.append([method, seeds, claims, *(_mean_text(mine, name) for name in MEASURES)])
            lines += _markdown(["method", "seeds", "claim", *(m.title for m in MEASURES.values())], body)
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
def figure(runs: Sequence[Run]) -> Figure:
    """Plot accuracy of tasks not unlearned (left) and JSD to the retrained model (right): mean and range over seeds."""
    scenarios, methods = group_by(runs, _scenario_name), list(group_by(runs, lambda run: run.name))
    picture = new_figure(60 + len(scenarios) * (50 + 20 * len(methods)), width=650)
    axes = picture.subplots(len(scenarios), 2, squeeze=False, sharey=True)
    look = {"fmt": "o", "color": COLOURS["here"], "ecolor": (COLOURS["here"], 0.35), "elinewidth": 5}
    for (scenario, mine), (left, right) in zip(scenarios.items(), axes, strict=True):
        of_methods = group_by(mine, lambda run: run.name)
        for ax, name in ((left, "remaining"), (right, "ratio")):
            for place, method in enumerate(methods):
                none = _below_detection if name == "ratio" else lambda run: False
                value = spread(0.0 if none(run) else MEASURES[name].get(run.last) for run in of_methods.get(method, ()))
                if value is not None:
                    reach = [[value.mean - value.low], [value.high - value.mean]]
                    ax.errorbar(value.mean, place, xerr=reach, clip_on=False, **look)
            ax.grid(axis="y")
            ax.set(title=scenario, ylim=(len(methods) - 0.5, -0.5))
        left.set_yticks(range(len(methods)), methods)
        left.set_xlabel("accuracy of remaining tasks")
        left.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        right.set_xlabel("JSD in units of its data-order floor")
        right.set_xscale("symlog", linthresh=1)
        right.set_xlim(left=0)
        right.xaxis.set_major_formatter("{x:g}")
        right.axvline(1, color=COLOURS["quiet"], linewidth=1, linestyle=":")
    return picture


def _below_detection(run: Run) -> bool:
    return (jsd := MEASURES["jsd"].get(run.last)) is not None and jsd < RESOLUTION


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raise ValueError if an experiment's runs differ in data, budget, versions, or a row's in more than the seed."""
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    for run in (run for entry in entries(runs) for run in entry.runs):  # raises an error for a run given twice
        settings = flatten(drop_seeds(run.settings) | {"versions": run.versions})
        names = _experiment_name(run), run.name, _scenario_name(run)
        for what, begins in ((names[:1], (*reading.OF_STUDY, "versions.")), (names, ("",))):
            other = seen.setdefault(what, settings)
            differ = [k for k in settings | other if k.startswith(begins) and settings.get(k) != other.get(k)]
            if differ:
                raise ValueError(f"runs of {', '.join(what)} differ in {', '.join(differ)}: report them apart")


@house_style
def write_tables(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write ``results.csv``, ``results.md`` and, for each experiment, a figure and a JSON file per seed."""
    _check_comparable(runs)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for run in runs:
        names = _experiment_name(run), run.name, _scenario_name(run), run.seed
        rows.append([*names, claim_of([run]), *(measure.get(run.last) for measure in MEASURES.values())])
    head = ["experiment", "method", "scenario", "seed", "claim", *MEASURES]
    contents = {"results.csv": csv_text([head, *rows]).encode(), "results.md": as_markdown(runs).encode()}
    for experiment, mine in group_by(runs, _experiment_name).items():
        drawn, picture = figure(mine), io.BytesIO()
        # A figure of many panels stays a file for a page; equal figures give equal bytes.
        drawn.savefig(picture, format="png", dpi=min(130, 2600 / drawn.get_figheight()), metadata={"Software": None})
        contents[f"{slug(experiment)}.png"] = picture.getvalue()
        for seed, of_seed in sorted(group_by(mine, lambda run: run.seed).items()):
            shown = [
                {"claim": claim_of([run]), "settings": run.settings, "after": list(map(_moment_values, run.moments))}
                for run in of_seed
            ]
            lines = ",\n".join(json.dumps(run, ensure_ascii=False) for run in shown)
            contents[f"{slug(experiment)}_seed{seed}.json"] = f"[\n{lines}\n]\n".encode()
    for name, content in contents.items():
        replace_file(out / name, content)
    return [out / name for name in contents]


def _mean_text(runs: Sequence[Run], name: str) -> str:
    """Return mean and standard deviation of a measure over seeds as text; with a seed count if some seeds lack it."""
    words = MEASURES[name].words
    if not (found := [value for run in runs if (value := MEASURES[name].get(run.last)) is not None]):
        return distance_in_words(0.0) if name == "ratio" and runs and all(map(_below_detection, runs)) else MISSING
    some = f" ({len(found)} of {len(runs)})" if len(found) < len(runs) else ""
    mean, deviation = fmean(found), stdev(found) if len(found) > 1 else None
    if words in (percent, points):
        return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}") + some
    told = without_unit(words(mean)) + ("" if deviation is None or mean < RESOLUTION else f" ± {two_digits(deviation)}")
    return told + some


def _setup_text(settings: Mapping[str, Any]) -> str:
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
