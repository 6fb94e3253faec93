"""Search for settings on held-out images, runs with the best settings on test images, and JSON files of results."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import inf, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from avalanche.core import SupervisedPlugin

from avalanche_amnesia.training.head_fit import fit_trained_head
from avalanche_amnesia.unlearning.logistic import FitError

Row = dict[str, Any]


class FitHead(SupervisedPlugin):
    """Avalanche plugin that fits a task's head again at the end of the task."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def after_training_exp(self, strategy, **kwargs):
        task = strategy.experience.task_label
        if task in strategy.model.tasks:
            with suppress(FitError):  # after a diverged training, the useless head stays
                fit_trained_head(strategy, task, self.seed)


@dataclass(frozen=True)
class Settings:
    """Tuned settings of a method on a stream.

    Attributes:
        optimizer: ``Adam`` or ``SGD`` (without momentum); empty for a method without settings.
        lr: learning rate of the optimizer.
        options: options of the strategy or its model; for DER++, of its plugin.
    """

    optimizer: str
    lr: float
    options: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.optimizer:
            return "nothing to choose"
        return ", ".join(f"{name} {value:g}" for name, value in {self.optimizer: self.lr, **self.options}.items())


def search(
    rates: Sequence[tuple[str, float]],
    setting: tuple[str, float, float] | None,
    between: float,
    measure: Callable[[Settings], float],
    trials: int = 6,
    most: float = inf,
) -> None:
    """Try all learning rates, then the best rate with a lower and a higher setting, then values between or beyond.

    Args:
        rates: pairs (optimizer, learning rate), tried with the setting's middle value.
        setting: name, middle value, and factor to the lower and higher value; None: two more rates are tried instead.
        between: factor from the best rate to these two rates.
        measure: function that runs a trial with given settings, and returns the accuracy.
        trials: total number of trials; trials after the sixth are chosen by :func:`next_to_try`.
        most: highest allowed value of the setting.
    """
    name, middle, factor = setting or (None, None, between)
    options = {} if name is None else {name: middle}
    tried = [(each, measure(each)) for each in (Settings(*rate, options) for rate in rates)]
    first = max(tried, key=lambda one: one[1])[0]
    for step in (1 / factor, factor):
        changed = {"lr": first.lr * step} if name is None else {"options": options | {name: middle * step}}
        tried.append((each := _rounded(replace(first, **changed)), measure(each)))
    factors = {"lr": 2.0} if name is None else {"lr": 2.0, name: factor}
    while len(tried) < trials and (following := next_to_try(tried, factors, most)) is not None:
        tried.append((following, measure(following)))


def next_to_try(
    tried: Sequence[tuple[Settings, float]], factors: Mapping[str, float], most: float = inf
) -> Settings | None:
    """Return the next settings to try: near the best ones, outside the tried range or in its widest gap; or None.

    Args:
        tried: tried settings with their accuracies.
        factors: ``lr`` and the setting's name → factor from the lowest or highest tried value to the next one; the
            second step beyond the range of the first six trials uses its square, the third its cube.
        most: highest allowed value of the setting.
    """
    best, known = max(tried, key=lambda one: one[1])[0], [each for each, _ in tried]
    beside, elsewhere = [], []
    for name, factor in factors.items():
        value = value_of(best, name)
        line = sorted({value_of(each, name) for each in known if with_value(each, name, value) == best})
        first = [value_of(each, name) for each in known[:6] if each.optimizer == best.optimizer]
        values = {value_of(each, name) for each in known if each.optimizer == best.optimizer}
        higher = value * factor ** (1 + sum(max(first) < each <= value for each in values))
        if value == line[-1] and (name == "lr" or higher <= most):
            beside.append((inf, with_value(best, name, higher)))
        if value == line[0]:
            lower = value / factor ** (1 + sum(value <= each < min(first) for each in values))
            beside.append((inf, with_value(best, name, lower)))
        for low, high in reversed([*pairwise(line)]):
            gap = log(high / low) / log(factor), with_value(best, name, sqrt(low * high))
            (beside if value in (low, high) else elsewhere).append(gap)
    for gaps in (beside, elsewhere):
        found = [(gap, rounded) for gap, each in gaps if (rounded := _rounded(each)) not in known]
        if found:
            return max(found, key=lambda one: one[0])[1]
    return None


def value_of(settings: Settings, name: str) -> float:
    """Return the value of the setting ``name``; ``lr`` is the learning rate."""
    return settings.lr if name == "lr" else settings.options[name]


def with_value(settings: Settings, name: str, value: float) -> Settings:
    """Return a copy of the settings with another ``value`` of ``name``; ``lr`` is the learning rate."""
    return replace(settings, lr=value) if name == "lr" else replace(settings, options={**settings.options, name: value})


def _rounded(settings: Settings) -> Settings:
    """Return the settings with all values rounded to two significant digits."""
    options = {name: float(f"{value:.2g}") for name, value in settings.options.items()}
    return replace(settings, lr=float(f"{settings.lr:.2g}"), options=options)


def rows_of(output: Path) -> list[Row]:
    """Return the result rows in a JSON file; an empty list if the file does not exist."""
    return json.loads(output.read_text()) if output.exists() else []


def measured(output: Path, what: Row, run: Callable[[], Row], table: Callable[[list[Row]], str]) -> Row:
    """Return the result row of a run; if the file lacks it, run it, add the row, and update the Markdown table.

    Args:
        output: JSON file of all rows; the table is next to it.
        what: name → value of the fields that identify the run (method, stream, seed, settings …).
        run: function that runs it, and returns the other fields of the row.
        table: function that returns all rows as Markdown.
    """
    row = next((row for row in rows_of(output) if what.items() <= row.items()), None)
    if row is None:
        row = what | run()
        print(row, flush=True)
        rows = [*rows_of(output), row]  # read again, because another process may have added rows
        output.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")  # a line per row
        output.with_suffix(".md").write_text(table(rows))
    return row


def best(rows: Iterable[Row], key: str, **what: Any) -> Any:
    """Return the value of ``key`` with the best mean accuracy on held-out images; None without trials that match."""
    tried: dict[str, list[Row]] = {}
    for row in rows:
        if row["validation"] and what.items() <= row.items():
            tried.setdefault(json.dumps(row[key]), []).append(row)
    found = max(tried.values(), key=lambda mine: mean(row["accuracy"] for row in mine), default=None)
    return None if found is None else found[0][key]


def rows_tested(rows: Iterable[Row], **what: Any) -> list[Row]:
    """Return the rows with results on test images that match ``what``."""
    return [row for row in rows if not row["validation"] and what.items() <= row.items()]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and, of several values, standard deviation as text."""
    return f"{mean(values):.{digits}f}" + (f"±{stdev(values):.{digits}f}" if len(values) > 1 else "")


def arguments(doc: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options that all experiments with trials have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--validation", nargs="*", type=int, default=[], help="seeds on held out training images")
    parser.add_argument("--test", nargs="*", type=int, default=[], help="seeds on the test images")
    return parser


def run_trials(
    output: Path,
    options: argparse.Namespace,
    places: Iterable[Mapping[str, Any]],
    rates: Sequence[float],
    run: Callable[..., Row],
    table: Callable[[list[Row]], str],
) -> None:
    """Run every learning rate on held-out training images, then each combination's best rate on test images.

    Args:
        output: JSON file of all rows.
        options: result of the parser that :func:`arguments` returns.
        places: combinations (of stream, method …) to run, each passed to ``run`` by name.
        rates: learning rates to try on held-out training images.
        run: function, also called with ``seed``, ``rate``, ``root`` and ``validation``; returns ``accuracy`` and more.
        table: function that returns all rows as Markdown.
    """
    torch.set_num_threads(1)
    cells = [(seed, True, rate) for seed in options.validation for rate in rates]
    cells += [(seed, False, None) for seed in options.test]
    for place, (seed, validation, rate) in product(places, cells):
        chosen = best(rows_of(output), "rate", **place) if rate is None else rate
        if chosen is not None:
            what = {**place, "seed": seed, "rate": chosen, "validation": validation}
            measured(output, what, lambda what=what: run(**what, root=options.root), table)
