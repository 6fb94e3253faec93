"""Results read from their folders, and put together: one entry per strategy and settings, with a run per seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """Content of one folder: the runs of all strategies with one seed.

    Attributes:
        folder: as it was given.
        settings: of all its runs.
        versions: package → version.
        strategies: name → events and unlearnings, as they stand in ``results.json``.
        timings: name → seconds of each unlearning, as they stand in ``timings.json``; empty without that file.
    """

    folder: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    strategies: Mapping[str, Mapping[str, Any]]
    timings: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def seed(self) -> Any:
        """Seed of its runs; None where the settings have none."""
        return self.settings.get("seed")


@dataclass(frozen=True)
class Spread:
    """Mean, lowest and highest of a number over seeds."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class SeedRun:
    """One run of one strategy."""

    seed: Any
    events: Sequence[Event]
    records: Sequence[Mapping[str, Any]]
    timings: Sequence[Mapping[str, Any]]

    @property
    def last(self) -> Event:
        """Event at the end of the stream."""
        return self.events[-1]


@dataclass(frozen=True)
class Entry:
    """One strategy at one choice of settings, with a run per seed."""

    name: str
    runs: Sequence[SeedRun]

    @property
    def first(self) -> SeedRun:
        """Run of the first seed."""
        return self.runs[0]

    @property
    def after(self) -> list[int]:
        """Tasks after which something was measured, in order."""
        return [int(event["task"]) for event in self.first.events]

    @property
    def unlearned(self) -> list[int]:
        """All tasks unlearned by the end of the stream."""
        return list(self.first.last.get("unlearned", ()))

    @property
    def requests(self) -> list[Event]:
        """Events with a request."""
        return [event for event in self.first.events if event.get("unlearned_now")]

    @property
    def timings(self) -> list[Mapping[str, Any]]:
        """Seconds of each unlearning of all seeds."""
        return [timing for run in self.runs for timing in run.timings]

    def spread(self, get: Callable[[Event], float | None], after: int | None = None) -> Spread | None:
        """A number over all seeds."""
        events = (run.last if after is None else _event(run, after) for run in self.runs)
        return spread(get(event) for event in events if event is not None)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean, lowest and highest of the numbers that there are; None for none."""
    there = [value for value in values if value is not None]
    return Spread(sum(there) / len(there), min(there), max(there), len(there)) if there else None


def value_of(key: str) -> Callable[[Event], float | None]:
    """Getter of an event's number."""
    return lambda event: event.get(key)


def of_task(key: str, task: int) -> Callable[[Event], float | None]:
    """Getter of a task's number from an event's table of tasks."""
    return lambda event: (event.get(key) or {}).get(str(task))


def mean_of(key: str, among: str | None = None) -> Callable[[Event], float | None]:
    """Getter of the mean of an event's table of tasks."""

    def mean(event: Event) -> float | None:
        numbers, others = event.get(key) or {}, event.get(among or key) or {}
        found = spread(value for task, value in numbers.items() if task in others)
        return None if found is None else found.mean

    return mean


def read_results(folder: str | Path) -> Results:
    """Read what ``write_results`` wrote.

    Args:
        folder: that holds ``results.json`` and, if there are any, ``timings.json``.

    Raises:
        ValueError: if it holds no results, or a file that is something else.
    """
    folder = Path(folder)
    file = folder / "results.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no results.json: give folders that `amnesia demo` or write_results made")
    content = _parsed(file)
    strategies = content.get("strategies") if isinstance(content, dict) else None
    if not isinstance(strategies, dict) or not strategies:
        raise ValueError(f"{file} has no strategies: give a folder that `amnesia demo` or write_results made")
    for name, run in strategies.items():
        events = run.get("events") if isinstance(run, dict) else None
        if not isinstance(events, list) or not all(isinstance(e, dict) and "task" in e for e in events) or not events:
            raise ValueError(f"{file}: {name!r} has no list of events with the task each came after")
    timings = _parsed(folder / "timings.json") if (folder / "timings.json").is_file() else {}
    return Results(str(folder), content.get("settings") or {}, content.get("versions") or {}, strategies, timings)


def grouped(results: Sequence[Results]) -> list[list[Results]]:
    """Results whose settings differ in nothing but the seed, together, in the order given."""
    if not results:
        raise ValueError("a report needs at least one folder with results")
    groups: dict[str, list[Results]] = {}
    for each in results:
        group = groups.setdefault(json.dumps(_seedless(each.settings), sort_keys=True), [])
        same = next((other for other in group if other.seed == each.seed and each.seed is not None), None)
        if same is not None:
            raise ValueError(
                f"{same.folder} and {each.folder} have the same settings and seed {each.seed}: give each run once"
            )
        group.append(each)
    return list(groups.values())


def entries(groups: Sequence[Sequence[Results]]) -> list[Entry]:
    """One entry per strategy and group, strategies in the order of the folders."""
    labels = _labels([group[0].settings for group in groups])
    found = []
    for label, group in zip(labels, groups, strict=True):
        names = dict.fromkeys(name for results in group for name in results.strategies)
        for name in names:
            runs = [_seed_run(results, name) for results in group if name in results.strategies]
            found.append(Entry(f"{name} ({label})" if label else name, runs))
    return found


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, ``budget.epochs``."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value and not all(name.isdigit() for name in value):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Words that set each of several settings apart; nothing where there is one."""
    flats = [flat(_seedless(each)) for each in settings]
    keys = dict.fromkeys(key for each in flats for key in each)
    apart = [key for key in keys if len({json.dumps(each.get(key), sort_keys=True) for each in flats}) > 1]
    return [", ".join(f"{key.split('.')[-1]} {each.get(key)}" for key in apart) for each in flats]


def _seed_run(results: Results, name: str) -> SeedRun:
    run = results.strategies[name]
    return SeedRun(results.seed, run["events"], run.get("unlearnings") or [], results.timings.get(name) or [])


def _event(run: SeedRun, after: int) -> Event | None:
    return next((event for event in run.events if event["task"] == after), None)


def _seedless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _seedless(inner) for key, inner in value.items() if key != "seed"}
    return value


def _parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_text(), parse_constant=lambda name: None)  # NaN: a number that does not exist
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): it was changed or not written as a whole") from error
