"""The page: results of runs as one HTML file that asks for nothing else, not even a font."""

import json
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from avalanche_amnesia.lab.report.answers import Answer, answer, claim
from avalanche_amnesia.lab.report.measures import COLUMNS, READINGS
from avalanche_amnesia.lab.report.reading import Entry, Run, entries, number, seedless, spread
from avalanche_amnesia.lab.report.sections import sections_of
from avalanche_amnesia.lab.report.tables import Table, mean, table, text
from avalanche_amnesia.lab.report.wording import listed, points, seconds, tasks


def report_page(runs: Sequence[Run]) -> str:
    """One page about what was forgotten, whether it really was, and what that cost the other tasks.

    Runs of one name whose settings differ in nothing but the seed are shown as one, with the range over the seeds. The
    same runs give the same bytes.

    Args:
        runs: of one or more folders, from :func:`read_runs`.

    Returns:
        HTML with its style, script and charts in it.

    Raises:
        ValueError: for no runs, or two of the same name, settings and seed.
    """
    found = entries(runs)
    answers = [answer(entry) for entry in found]
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            about=_about(runs),
            opening=_opening(found, answers),
            answers=answers,
            summary=_summary(found),
            sections=sections_of(runs, found),
            readings={reading.key: reading for reading in READINGS},
            listed=listed,
            records=[(entry.name, _records(entry)) for entry in found if any(each.records for each in entry.runs)],
        )
    )


def _summary(found: Sequence[Entry]) -> Table:
    """One row per strategy at the end of its stream: means over seeds."""
    rows = [
        {
            "strategy": text(entry.name),
            "seeds": text(len(entry.runs)),
            "claim": text(claim(entry)),
            **{column.page: mean(entry.spread(column.of), column.words) for column in COLUMNS.values()},
            "time to unlearn": mean(spread(cost.unlearn for cost in entry.costs), seconds),
            "time to retrain": mean(spread(cost.retrain for cost in entry.costs), seconds),
        }
        for entry in found
    ]
    return table("All strategies at the end of the stream", rows)


def _about(runs: Sequence[Run]) -> str:
    """Data and seeds, in one line."""
    seeds = list(dict.fromkeys(each.seed for each in runs if each.seed is not None))
    data = list(dict.fromkeys(str(each.settings["data"]) for each in runs if "data" in each.settings))
    choices = {json.dumps(seedless(each.settings), sort_keys=True) for each in runs}
    parts = [listed(data)] if data else []
    parts += [f"seed{'s' * (len(seeds) > 1)} {listed(seeds)}"] if seeds else []
    parts += [f"{len(choices)} choices of settings"] if len(choices) > 1 else []
    return ", ".join(parts)


def _opening(found: Sequence[Entry], answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """The verdicts on all strategies, a line each, with what it cost the others."""
    verdicts = {
        "exact": "Provably forgotten, bit for bit",
        "clear": "No trace found, but no proof",
        "trace": "Traces found",
        "open": "Undecided by what was measured",
        "nothing": "Nothing to forget",
    }
    asked = list(dict.fromkeys(each.forgotten for each in answers))
    lines: dict[str, list[str]] = {}
    for entry, each in zip(found, answers, strict=True):
        difference = entry.spread(number("AccuracyDifference"))
        cost = ""
        if difference is not None and entry.unlearned:
            cost = f" (other tasks: {points(difference.mean)} of accuracy)"
        lines.setdefault(each.verdict, []).append(f"{each.name}{cost}")
    opening = [("Asked to forget", asked[0])] if len(asked) == 1 else []
    return opening + [(words, listed(lines[verdict])) for verdict, words in verdicts.items() if verdict in lines]


def _records(entry: Entry) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """(title, (label, lines)) of every record."""
    found = []
    for each in entry.runs:
        for record in each.records:
            plan = record.get("plan") or {}
            touched = sum((plan.get("entries") or {}).values())
            rows = [
                ("claim", [plan.get("claim", "–")]),
                ("reasons", plan.get("reasons") or (["none: it is exact"] if plan.get("claim") == "exact" else [])),
                ("remaining", [tasks(record.get("remaining") or [])]),
                ("affected", [tasks(plan["affected"])] if plan.get("affected") else []),
                ("compensated", [tasks(plan["compensated"])] if plan.get("compensated") else []),
                ("repaired", [tasks(plan["repaired"])] if plan.get("repaired") else []),
                ("taken out", [f"{touched:,} entries of {len(plan['entries'])} tensors"] if touched else []),
                ("removed", list(plan.get("removed") or [])),
                ("cleaned", list(record.get("purged") or [])),
                ("not cleaned", list(plan.get("unpurged") or [])),
            ]
            seed = "" if each.seed is None else f", seed {each.seed}"
            title = f"{tasks(plan.get('tasks') or []).capitalize()}, {plan.get('event', '')}{seed}"
            found.append((title, [(label, [str(line) for line in lines]) for label, lines in rows if lines]))
    return found


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("avalanche_amnesia.lab.report"),
        autoescape=True,  # names and reasons are anybody's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
