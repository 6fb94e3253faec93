"""The report page: results of runs as one self-contained HTML file."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from avalanche_amnesia.lab.report.charts import legend_of
from avalanche_amnesia.lab.report.measures import COLUMNS, JSD, OLD_HEAD, TRACE_TESTS
from avalanche_amnesia.lab.report.reading import Entry, Run, entries, number, plan_values, spread
from avalanche_amnesia.lab.report.sections import sections_of
from avalanche_amnesia.lab.report.tables import Row, Table, by_seed, mean, table, text
from avalanche_amnesia.lab.report.verdicts import FAR, FEWEST, FINDINGS, verdict_of
from avalanche_amnesia.lab.report.wording import MISSING, listed, over_seeds, percent, points, seconds, tasks, times

Line = Mapping[str, Any]


def report_page(runs: Sequence[Run]) -> str:
    """Return the HTML report page: unlearned tasks, tests for traces of these tasks, and costs for all other tasks.

    Runs that differ only in the seed are shown as one strategy, with the range over seeds. Equal runs give equal bytes.
    """
    found = entries(runs)
    lines = [_strategy_row(entry) for entry in found]
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            about=_about(runs),
            lines=lines,
            tests=list(dict.fromkeys(outcome.test.check for line in lines for outcome in line["verdict"].outcomes)),
            summary=_summary(lines),
            sections=sections_of(found),
            readings={test.key: test for test in (JSD, *TRACE_TESTS)},
            records=[
                (e.name, plan_values(e.runs, "reasons"), by_seed(f"Records of {e.name}", [e], _records)) for e in found
            ],
        )
    )


def _strategy_row(entry: Entry) -> Line:
    """Return a strategy's row in the summary: verdict, costs, and accuracy on unlearned tasks or unlearned samples."""
    read_of = (each for each in TRACE_TESTS if each is OLD_HEAD or each.of_samples)
    test = next((each for each in read_of if entry.spread(number(each.metric)) is not None), OLD_HEAD)
    metrics = (
        ("here", test.check, test.metric),
        ("retrained", "retrained model", f"{test.metric}{test.compare_to}"),
        ("chance", "chance", f"{test.metric}_chance"),
    )
    read = [(role, name, entry.spread(number(metric))) for role, name, metric in metrics]
    dots = [(role, name, value) for role, name, value in read if value is not None]
    gains = [(name, entry.spread(COLUMNS[key].get)) for name, key in (("AD", "difference"), ("control", "control"))]
    return {
        "entry": entry,
        "verdict": verdict_of(entry.runs),
        "forgotten": _requests_text(entry),
        "dots": dots,
        "read": ", ".join(f"{name} {over_seeds(value, percent)}" for _, name, value in dots),
        "remaining": over_seeds(entry.spread(COLUMNS["remaining"].get), percent),
        "difference": ", ".join(f"{name} {points(value.mean)}" for name, value in gains if value is not None),
        "cost": _times(entry),
    }


def _times(entry: Entry) -> Sequence[str]:
    """Return the mean times of an unlearning and of a retraining, formatted as two texts; empty if not measured."""
    unlearn, retrain = (spread(getattr(cost, what) for cost in entry.costs) for what in ("unlearn", "retrain"))
    if unlearn is None or retrain is None or not any(run.unlearns for run in entry.runs):
        return []
    ratio = f" ({times(retrain.mean / unlearn.mean)})" if unlearn.mean else ""
    return [seconds(unlearn.mean), f"retraining {seconds(retrain.mean)}{ratio}"]


def _requests_text(entry: Entry) -> str:
    if not entry.requests:
        return "nothing"
    told, unlearned = list[str](), entry.first.last.unlearned
    for moment in entry.requests.values():
        whole = [tasks(moment.unlearned_now)] if moment.unlearned_now else []
        told.append(f"{listed([*whole, *moment.parts_now])} after task {moment.task}")
    requests = "; ".join(told)
    return f"{tasks(unlearned)} of {len({*entry.after})} ({requests})" if unlearned else requests


def _summary(lines: Sequence[Line]) -> Table:
    """Return a table with one row per strategy: means over seeds at the end of the stream."""
    rows = [
        {
            "strategy": text(line["entry"].name),
            "verdict": text(line["verdict"]),
            "seeds": text(len(line["entry"].runs)),
            "claim": text(line["verdict"].claim or MISSING),
            **{column.page: mean(line["entry"].spread(column.get), column.words) for column in COLUMNS.values()},
            "time to unlearn": mean(spread(cost.unlearn for cost in line["entry"].costs), seconds),
            "time to retrain": mean(spread(cost.retrain for cost in line["entry"].costs), seconds),
        }
        for line in lines
    ]
    return table("All strategies at the end of the stream", rows)


def _records(run: Run) -> Iterator[Row]:
    """Yield a table row per unlearning record of a run."""
    for record in run.records:
        plan: dict[str, Any] = record["plan"]
        touched = sum(plan["entries"].values())
        taken = f"{touched:,} entries of {len(plan['entries'])} tensors" if touched else ""
        yield {
            "request": text(f"{tasks(plan['tasks'])} {plan['event']}"),
            "claim": text(record["claim"]),
            "remaining": text(tasks(record["remaining"])),
            **{name: text(listed(plan[name])) for name in ("affected", "compensated", "repaired")},
            "taken out": text(taken),
            "removed": text(", ".join(plan["removed"])),
            "cleaned": text(", ".join(record["purged"])),
            "not cleaned": text(", ".join(plan["unpurged"])),
            "signature": text(record["signature"]),
        }


def _about(runs: Sequence[Run]) -> str:
    """Return the data sets and seeds of all runs as one line of text."""
    seeds = dict.fromkeys(each.seed for each in runs if each.seed is not None)
    data = dict.fromkeys(str(each.settings["data"]) for each in runs if "data" in each.settings)
    parts = [listed(data)] if data else []
    parts += [f"seed{'s' * (len(seeds) > 1)} {listed(seeds)}"] if seeds else []
    return ", ".join(parts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("avalanche_amnesia.lab.report"),
        autoescape=True,  # names and reasons are untrusted text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"listed": listed, "tasks": tasks, "percent": percent}
    environment.globals |= {"legend_of": legend_of, "findings": FINDINGS, "few": FEWEST, "far": FAR}
    return environment
