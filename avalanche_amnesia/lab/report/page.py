"""The page: results of runs as one HTML file that asks for nothing else, not even a font."""

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from avalanche_amnesia.lab.report.answers import answer, claim
from avalanche_amnesia.lab.report.measures import COLUMNS, READINGS
from avalanche_amnesia.lab.report.reading import Entry, Run, entries, spread
from avalanche_amnesia.lab.report.sections import sections_of
from avalanche_amnesia.lab.report.tables import Table, mean, table, text
from avalanche_amnesia.lab.report.wording import listed, seconds, tasks


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
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            about=_about(runs),
            answers=[answer(entry) for entry in found],
            summary=_summary(found),
            sections=sections_of(runs, found),
            readings={reading.key: reading for reading in READINGS},
            recorded=[entry for entry in found if any(run.records for run in entry.runs)],
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
    parts = [listed(data)] if data else []
    parts += [f"seed{'s' * (len(seeds) > 1)} {listed(seeds)}"] if seeds else []
    return ", ".join(parts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("avalanche_amnesia.lab.report"),
        autoescape=True,  # names and reasons are anybody's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"listed": listed, "tasks": tasks}
    return environment
