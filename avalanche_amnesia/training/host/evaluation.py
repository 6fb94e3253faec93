"""Evaluations of the host: they wipe what is still needed, and keep what must go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from avalanche_amnesia.transaction import Transaction


def drop_last_values(evaluator: Any, tasks: Iterable[int], change: Transaction) -> None:
    """Drop the last values of forgotten tasks' metrics; ``change`` receives all of it.

    Avalanche repeats the last value of every metric for ever: of a forgotten task that reads as if it were known.
    """
    ends = tuple(f"/Task{task:03d}" for task in tasks)
    last = evaluator.last_metric_results
    left = {name: value for name, value in last.items() if not any(end in name for end in ends)}
    change.set(evaluator, last_metric_results=left)


@contextmanager
def preserved_minibatch(strategy: Any) -> Iterator[None]:
    """Keep the mini-batch and the loss of an iteration, which an evaluation in the middle of it wipes."""
    saved = {name: getattr(strategy, name) for name in ("mbatch", "mb_output", "loss", "_eval_streams")}
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(strategy, name, value)
