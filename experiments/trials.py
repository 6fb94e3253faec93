"""Trials of learning rates on held out training images, and runs on test images at each method's best one."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from avalanche.core import SupervisedPlugin

from avalanche_amnesia.training.head_fit import fit_trained_head

Row = dict[str, Any]


class FitHead(SupervisedPlugin):
    """Fits the head of a task that ends, for a method that does not."""

    repeatable = True

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def after_training_exp(self, strategy, **kwargs):
        task = strategy.experience.task_label
        if task in strategy.model.tasks:
            fit_trained_head(strategy, task, self.seed)


def best_rate(rows: Iterable[Row], what: Mapping[str, Any]) -> float | None:
    """The rate with the best mean on held out training images; None where none was tried."""
    tried: dict[float, list[float]] = {}
    for row in rows:
        if row["validation"] and what.items() <= row.items():
            tried.setdefault(row["rate"], []).append(row["accuracy"])
    return max(sorted(tried), key=lambda rate: mean(tried[rate]), default=None)


def test_rows(rows: Iterable[Row], **what: Any) -> list[Row]:
    """Rows of test images."""
    return [row for row in rows if not row["validation"] and what.items() <= row.items()]


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
    """Run what is not in a JSON file yet, add it there, and write the table beside it.

    Args:
        output: the file.
        options: what :func:`arguments` parsed.
        places: what a row is of beside seed and rate; passed to ``run`` by name.
        rates: to try on held out training images.
        run: called with ``seed``, ``rate``, ``root`` and ``validation`` besides; returns ``accuracy`` and more.
        table: Markdown of all rows.
    """
    torch.set_num_threads(1)

    def rows() -> list[Row]:
        return json.loads(output.read_text()) if output.exists() else []

    cells = [(seed, True, rate) for seed in options.validation for rate in rates]
    cells += [(seed, False, None) for seed in options.test]
    for place, (seed, validation, rate) in product(places, cells):
        chosen = best_rate(rows(), place) if rate is None else rate
        what = {**place, "seed": seed, "rate": chosen, "validation": validation}
        if chosen is None or any(what.items() <= row.items() for row in rows()):
            continue
        row = what | run(**what, root=options.root)
        print(row, flush=True)
        output.write_text(json.dumps([*rows(), row], indent=1) + "\n")  # read again: others may add to it meanwhile
    output.with_suffix(".md").write_text(table(rows()))
