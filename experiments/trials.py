"""Trials of settings on held out training images, and runs on test images with the best ones: rows of a JSON file."""

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
    """Fits the head of a task that ends, for a method that does not."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def after_training_exp(self, strategy, **kwargs):
        task = strategy.experience.task_label
        if task in strategy.model.tasks:
            with suppress(FitError):  # a training that diverged: its head stays, and reads nothing
                fit_trained_head(strategy, task, self.seed)


@dataclass(frozen=True)
class Settings:
    """Settings of a method on a stream.

    Attributes:
        optimizer: ``Adam`` or ``SGD`` (without momentum); empty for a method without settings.
        lr: its learning rate.
        options: of the strategy or its model; of DER++'s plugin.
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
    """Try the rates at the middle of a setting, then the best one with a lower and a higher setting, then others.

    Args:
        rates: optimizers and learning rates.
        setting: name, middle value and the factor to its neighbours; None: a lower and a higher rate are tried.
        between: factor from the best rate to these two.
        measure: gives the accuracy of settings.
        trials: how many in all; those after the sixth are :func:`next_to_try`.
        most: the highest value that the setting can have.
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
    """Return the next settings to try: beyond an end of those tried, or in the widest gap next to the best; or None.

    Args:
        tried: settings with their accuracies.
        factors: ``lr``, and the name of the setting, to the factor by which it goes beyond an end.
        most: the highest value that the setting can have.
    """
    best, known = max(tried, key=lambda one: one[1])[0], [each for each, _ in tried]
    beside, elsewhere = [], []
    for name, factor in factors.items():
        value = value_of(best, name)
        line = sorted({value_of(each, name) for each in known if with_value(each, name, value) == best})
        if value == line[-1] and (name == "lr" or value * factor <= most):
            beside.append((inf, with_value(best, name, value * factor)))
        if value == line[0]:
            beside.append((inf, with_value(best, name, value / factor)))
        for low, high in reversed([*pairwise(line)]):
            gap = log(high / low) / log(factor), with_value(best, name, sqrt(low * high))
            (beside if value in (low, high) else elsewhere).append(gap)
    for gaps in (beside, elsewhere):
        found = [(gap, rounded) for gap, each in gaps if (rounded := _rounded(each)) not in known]
        if found:
            return max(found, key=lambda one: one[0])[1]
    return None


def value_of(settings: Settings, name: str) -> float:
    """Return the learning rate, or the value of a setting."""
    return settings.lr if name == "lr" else settings.options[name]


def with_value(settings: Settings, name: str, value: float) -> Settings:
    """Return the settings with another learning rate, or another value of a setting."""
    return replace(settings, lr=value) if name == "lr" else replace(settings, options={**settings.options, name: value})


def _rounded(settings: Settings) -> Settings:
    """Return the settings with two digits."""
    options = {name: float(f"{value:.2g}") for name, value in settings.options.items()}
    return replace(settings, lr=float(f"{settings.lr:.2g}"), options=options)


def rows_of(output: Path) -> list[Row]:
    """Rows of a file, which may not be there yet."""
    return json.loads(output.read_text()) if output.exists() else []


def measured(output: Path, what: Row, run: Callable[[], Row], table: Callable[[list[Row]], str]) -> Row:
    """The row of what was run: from the file, else run, added to it, and the table written beside it.

    Args:
        output: the file.
        what: what the row is of.
        run: gives the rest of the row.
        table: Markdown of all rows.
    """
    row = next((row for row in rows_of(output) if what.items() <= row.items()), None)
    if row is None:
        row = what | run()
        print(row, flush=True)
        rows = [*rows_of(output), row]  # read again: others may add to it meanwhile
        output.write_text(json.dumps(rows, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(rows))
    return row


def best(rows: Iterable[Row], key: str, **what: Any) -> Any:
    """The value with the best mean accuracy on held out training images, on a tie the first; None without trials."""
    tried: dict[str, list[Row]] = {}
    for row in rows:
        if row["validation"] and what.items() <= row.items():
            tried.setdefault(json.dumps(row[key]), []).append(row)
    found = max(tried.values(), key=lambda mine: mean(row["accuracy"] for row in mine), default=None)
    return None if found is None else found[0][key]


def rows_tested(rows: Iterable[Row], **what: Any) -> list[Row]:
    """Rows of test images."""
    return [row for row in rows if not row["validation"] and what.items() <= row.items()]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean, and standard deviation where there are several."""
    return f"{mean(values):.{digits}f}" + (f"±{stdev(values):.{digits}f}" if len(values) > 1 else "")


def arguments(doc: str) -> argparse.ArgumentParser:
    """Options of every such experiment."""
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
    """Every rate on held out training images, then each place's best one on test images.

    Args:
        output: the file.
        options: what :func:`arguments` parsed.
        places: what a row is of beside seed and rate; passed to ``run`` by name.
        rates: to try on held out training images.
        run: called with ``seed``, ``rate``, ``root`` and ``validation`` besides; returns ``accuracy`` and more.
        table: Markdown of all rows.
    """
    torch.set_num_threads(1)
    cells = [(seed, True, rate) for seed in options.validation for rate in rates]
    cells += [(seed, False, None) for seed in options.test]
    for place, (seed, validation, rate) in product(places, cells):
        chosen = best(rows_of(output), "rate", **place) if rate is None else rate
        if chosen is not None:
            what = {**place, "seed": seed, "rate": chosen, "validation": validation}
            measured(output, what, lambda what=what: run(**what, root=options.root), table)
