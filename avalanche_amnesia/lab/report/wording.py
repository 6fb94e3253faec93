"""Format numbers as text, with units and the range over seeds."""

from collections.abc import Callable, Collection
from typing import Any

from avalanche_amnesia.audit.words import seconds_in_words
from avalanche_amnesia.evaluation.resolution import two_digits
from avalanche_amnesia.lab.report.reading import Spread

MISSING = "–"
_SPACE = "\u00a0"  # no line break between a number and its unit


def percent(value: float) -> str:
    """Format a fraction as a percentage: ``61.1 %``."""
    return f"{100 * value:.1f}{_SPACE}%"


def points(value: float) -> str:
    """Format a difference of fractions in percentage points: ``+0.7 points``."""
    rounded = round(100 * value, 1)
    return f"{'−' if rounded < 0 else '+'}{abs(rounded):.1f}{_SPACE}points" if rounded else f"0.0{_SPACE}points"


def times(value: float) -> str:
    """Format a ratio: ``1.8 ×``."""
    return f"{two_digits(value)}{_SPACE}×"


def share(value: float) -> str:
    """Format a number between 0 and 1: ``0.640``."""
    return f"{value:.3f}"


def seconds(value: float) -> str:
    """Format a number of seconds with a suitable unit."""
    return seconds_in_words(value).replace(" ", _SPACE)


def without_unit(words: str) -> str:
    """Remove the unit from a formatted number."""
    return words.partition(_SPACE)[0]


def over_seeds(value: Spread | None, words: Callable[[float], str]) -> str:
    """Format a number over seeds: the mean, and the range if the seeds differ; a dash for None."""
    if value is None:
        return MISSING
    mean, low, high = words(value.mean), words(value.low), words(value.high)
    if low == high:
        return mean
    if low.partition(_SPACE)[2] == high.partition(_SPACE)[2]:
        low = without_unit(low)  # write the unit only once
    return f"{mean} ({low} to {high})"


def listed(items: Collection[Any]) -> str:
    """Join items to an English list: ``0``, ``0 and 1``, ``0, 1 and 4``."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def tasks(labels: Collection[int]) -> str:
    """Format tasks as an English list: ``task 0``, ``tasks 0, 1 and 4``, ``no task``."""
    return f"task{'s' * (len(labels) > 1)} {listed(labels)}" if labels else "no task"
