"""Runs read from their logs, and put together: one entry per name and settings, with a run per seed."""

import json
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from avalanche_amnesia.audit.record import NOT_OBEYED, UnlearningRecord
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, JSONRunError, lines_of
from avalanche_amnesia.logging.names import EVENT, EVENTS, ITERATION, TASK

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Numbers = dict[str, dict[int | None, float]]
"""Name of a metric → task, None for all of them → number."""
Table = Sequence[Sequence[Any]]
"""Rows, the first of which has the columns."""
_ACCURACY = "Top1_Acc_Exp"
_COST = ("SecondsToUnlearn/eval_phase/test_stream", "SecondsToRetrain/eval_phase/test_stream")
_NAME = re.compile(r"(?P<name>(?!.*/train_(phase|stream)).+?)(/eval_phase/\w+)?(/Task(?P<task>\d+))?(/Exp\d+)?")
"""Name of a number, in which the stream does not count; numbers of trainings have none."""
_AXES = (ITERATION, TASK, EVENT)
_LISTED = re.compile(r"\d+(, \d+)*")
"""Tasks in the table of events; other words tell of parts of a task."""


@dataclass(frozen=True)
class Moment:
    """A run between two tasks, as it was evaluated: what was measured since the moment before.

    Attributes:
        task: the task just trained.
        remaining: remaining tasks, in training order.
        unlearned: all tasks unlearned so far, in the order of unlearning.
        unlearned_now: those of them that went since the moment before.
        parts: samples of remaining tasks that were unlearned so far, in words, an entry per request.
        parts_now: those of them that went since the moment before.
        claim: of the last unlearning so far.
        numbers: of the last event, a task's end or an unlearning; of several the last one counts.
        first: the first number of each name, of any event since the moment before.
        tables: of the last event.
    """

    task: int
    remaining: tuple[int, ...]
    unlearned: tuple[int, ...]
    unlearned_now: tuple[int, ...]
    claim: str | None
    numbers: Numbers
    parts: tuple[str, ...] = ()
    parts_now: tuple[str, ...] = ()
    first: Numbers = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)

    def number(self, name: str, task: int | None = None) -> float | None:
        """A metric's number, of one task or of all; None where it was not measured."""
        return self.numbers.get(name, {}).get(task)

    def by_task(self, name: str) -> dict[int, float]:
        """Task → number of a metric."""
        return {task: value for task, value in self.numbers.get(name, {}).items() if task is not None}

    @property
    def accuracy(self) -> dict[int, float]:
        """Remaining task → test accuracy."""
        found = self.by_task(_ACCURACY)
        return {task: found[task] for task in self.remaining if task in found}

    @property
    def accuracies(self) -> dict[int, float]:
        """Task that was read → accuracy: remaining ones, and unlearned ones through their old heads."""
        return self.accuracy | self.by_task("UnlearnedAccuracy")


@dataclass(frozen=True)
class Cost:
    """Seconds of one unlearning, and of training its reference from the beginning."""

    after: int
    unlearn: float
    retrain: float


@dataclass(frozen=True)
class Run:
    """One run, as its log tells it.

    Attributes:
        folder: as it was given.
        name: that the logger was given; else the strategy's.
        settings: that the logger was given; else the strategy's.
        seed: None where the run names none.
        versions: package → version.
        moments: in order.
        records: of its unlearnings.
        costs: of its unlearnings.
        source: folder or pack that it was found in, where several were read.
        signatures: of its records, a few words each.
        id: that the logger drew for it.
        ended: whether its log does, and not with an error; else it was stopped, or still runs.
        unrecorded: number of unlearnings whose record is not there.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    seed: Any
    versions: Mapping[str, str]
    moments: Sequence[Moment]
    records: Sequence[Mapping[str, Any]] = ()
    costs: Sequence[Cost] = ()
    source: str = ""
    signatures: Sequence[str] = ()
    id: str = ""
    ended: bool = True
    unrecorded: int = 0

    @property
    def last(self) -> Moment:
        """The end of the stream."""
        return self.moments[-1]

    @property
    def obeys(self) -> bool:
        """Tell whether any request was more than entered into the ledger."""
        reasons = [(record.get("plan") or {}).get("reasons") or () for record in self.records]
        return not reasons or not all(NOT_OBEYED in of for of in reasons)

    @property
    def of_seed(self) -> str:
        """Its seed in words."""
        return "the run" if self.seed is None else f"seed {self.seed}"


@dataclass(frozen=True)
class Spread:
    """Mean, lowest and highest of a number over seeds."""

    mean: float
    low: float
    high: float
    n: int


Get = Callable[[Moment], float | None]


@dataclass(frozen=True)
class Entry:
    """One strategy at one choice of settings, with a run per seed."""

    name: str
    runs: Sequence[Run]

    @property
    def first(self) -> Run:
        """Run of the first seed."""
        return self.runs[0]

    @property
    def after(self) -> list[int]:
        """Tasks after which something was measured, in order."""
        return [moment.task for moment in self.first.moments]

    @property
    def requests(self) -> dict[int, Moment]:
        """Place in the stream → moment with a request."""
        return {at: moment for at, moment in enumerate(self.first.moments) if moment.unlearned_now or moment.parts_now}

    @property
    def costs(self) -> list[Cost]:
        """Costs of each unlearning of all seeds."""
        return [cost for run in self.runs for cost in run.costs]

    def spread(self, get: Get, place: int = -1) -> Spread | None:
        """A number over all seeds, at a place of the stream; -1: at its end."""
        return spread(get(run.moments[place]) for run in self.runs if place < len(run.moments))


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean, lowest and highest of the numbers that there are; None for none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    low, high = min(there), max(there)
    return Spread(min(max(sum(there) / len(there), low), high), low, high, len(there))  # equal numbers have no range


def number(name: str, task: int | None = None) -> Get:
    """Getter of a metric's number, of one task or of all."""
    return lambda moment: moment.number(name, task)


def read_runs(folder: str | Path) -> list[Run]:
    """Read the runs of a folder and below it, in the order of their paths; those without an evaluation are left out.

    Args:
        folder: that holds ``run.jsonl`` of a :class:`~avalanche_amnesia.lab.logging.JSONLogger`, at any depth.

    Raises:
        JSONRunError: for a log that is broken.
        ValueError: if no run was evaluated after a task.
    """
    found = [read_run(file.parent) for file in sorted(Path(folder).rglob(RUN_FILE))]
    there = [replace(run, source=str(folder)) for run in found if run.moments]
    if not there:
        raise ValueError(
            f"{folder} holds no {RUN_FILE} of a run that was evaluated after a task: give folders that `amnesia demo`"
            ", `amnesia sweep` or a JSONLogger filled"
        )
    return there


def read_run(folder: str | Path) -> Run:
    """Read one run.

    A moment ends with each evaluation between tasks, where the logger writes its table of events.

    Args:
        folder: that holds ``run.jsonl``.

    Raises:
        JSONRunError: if it holds none, or a broken one.
    """
    folder = Path(folder)
    head: dict[str, Any] = {}
    strategy: dict[str, Any] = {}
    ended = False
    records, signatures, reader = list[dict[str, Any]](), list[str](), _Reader()
    for number, line in enumerate(lines_of(folder), 1):
        try:
            match line["kind"]:
                case "run":
                    head = {name: line[name] for name in ("id", "name", "config")}
                case "settings":
                    strategy = line["settings"]
                case "record":
                    text = (folder / line["path"]).read_text()
                    records.append(asdict(UnlearningRecord.from_json(text)))
                    signatures.append("signed, not checked" if "signature" in json.loads(text) else "not signed")
                case "row":
                    reader.take(line["values"])
                case "end":
                    ended = line["exit_code"] == 0
        except FileNotFoundError as error:
            raise JSONRunError(
                f"line {number} of {folder / RUN_FILE} names {line['path']}, which is not there"
            ) from error
        except (KeyError, IndexError) as error:
            raise JSONRunError(f"line {number} of {folder / RUN_FILE} is broken: it has no {error}") from error
    settings = head["config"] or {n: of for n, of in strategy.items() if n not in ("method", "seed", "versions")}
    return Run(
        folder=folder,
        name=head["name"] or strategy.get("method", folder.name),
        settings=settings,
        seed=settings.get("seed", strategy.get("seed")),
        versions=strategy.get("versions", {}),
        moments=reader.moments,
        records=records,
        costs=reader.costs,
        signatures=signatures,
        id=head["id"],
        ended=ended,
        unrecorded=max(0, reader.claims - len(records)),
    )


class _Reader:
    """Takes the rows of a log one after another."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.costs: list[Cost] = []
        self.claims = 0
        self._numbers: Numbers = {}
        self._tables: dict[str, Table] = {}
        self._first: Numbers = {}
        self._event = self._ended = -1

    def take(self, row: Mapping[str, Any]) -> None:
        """Take a row; one with the table of events ends a moment."""
        if row[EVENT] != self._event:  # what was measured of a task before it went is not the moment's
            self._numbers, self._tables, self._event = {}, {}, row[EVENT]
        for key, value in row.items():
            if isinstance(value, dict) and value["_type"] == "table":
                self._tables[key] = [value["columns"], *value["data"]]
            elif _is_number(value) and key not in _AXES and (found := _NAME.fullmatch(key)):
                task = None if found["task"] is None else int(found["task"])
                self._numbers.setdefault(found["name"], {})[task] = value
                self._first.setdefault(found["name"], {}).setdefault(task, value)
        if all(map(_is_number, map(row.get, _COST))):
            self.costs.append(Cost(row[TASK], row[_COST[0]], row[_COST[1]]))
        if EVENTS in row:
            self._end()

    def _end(self) -> None:
        columns, *rows = self._tables.pop(EVENTS)
        events = [dict(zip(columns, row, strict=True)) for row in rows]
        before: tuple[int, ...] = ()
        n_parts_before = 0
        first = self._first
        if self._ended == self._event:  # evaluated once more
            first = self.moments.pop().first
        if self.moments:
            before, n_parts_before = self.moments[-1].unlearned, len(self.moments[-1].parts)
        trained: dict[int, None] = {}
        gone: dict[int, None] = {}
        parts: list[str] = []
        for event in events:
            if event["what"] == "trained":
                gone.pop(event["task"], None)
                trained[event["task"]] = None
            if _LISTED.fullmatch(event["unlearned"] or ""):
                gone |= dict.fromkeys(_tasks(event["unlearned"]))
            elif event["unlearned"]:
                parts.append(event["unlearned"])
        self.claims = sum(event["claim"] is not None for event in events)
        listed = events[-1]["remaining"]  # None: nobody keeps a ledger
        remaining = tuple(task for task in trained if task not in gone) if listed is None else _tasks(listed)
        # A run that was resumed with another logger has requests that this log does not tell of.
        read = [task for task in self._numbers.get("UnlearnedAccuracy", {}) if task is not None]
        earlier = [task for task in read if task not in gone and task not in remaining]
        self.moments.append(
            Moment(
                task=events[-1]["task"],
                remaining=remaining,
                unlearned=(*earlier, *gone),
                unlearned_now=tuple(task for task in gone if task not in before),
                claim=next((event["claim"] for event in reversed(events) if event["claim"]), None),
                numbers={name: dict(of) for name, of in self._numbers.items()},
                parts=tuple(parts),
                parts_now=tuple(parts[n_parts_before:]),
                first=first,
                tables=dict(self._tables),
            )
        )
        self._first, self._ended = {}, self._event


def _is_number(value: object) -> bool:
    """Tell whether a value is a finite number, however the file was written."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tasks(listed: str | None) -> tuple[int, ...]:
    return tuple(map(int, listed.split(", "))) if listed else ()


def entries(runs: Sequence[Run]) -> list[Entry]:
    """One entry per name and settings without the seed, in the order of the runs; each run may be there once.

    Where runs are of several studies (another stream, network or budget), the names say of which.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    groups = grouped(runs, lambda run: (run.name, json.dumps(seedless(run.settings), sort_keys=True)))
    for same, run in (pair for group in groups.values() for pair in combinations(group, 2)):
        if _is_same(run, same):
            raise ValueError(
                f"{same.folder} and {run.folder} have the same name and settings, and both are of {run.of_seed}: give "
                "each run once"
            )
    named = [name for name, _ in groups]
    flats = [flat(seedless(group[0].settings)) for group in groups.values()]
    of_study = {key for each in flats for key in each if key.startswith(OF_STUDY)}
    differ = {key for key in of_study if len({repr(each[key]) for each in flats if key in each}) > 1}
    alike = [[each for other, each in zip(named, flats, strict=True) if other == name] for name in named]
    apart = [_apart(mine, others, differ) for mine, others in zip(flats, alike, strict=True)]
    shown = [(name, _label(mine, _short(keys))) for name, mine, keys in zip(named, flats, apart, strict=True)]
    found = []
    for (name, label), mine, keys, group in zip(shown, flats, apart, groups.values(), strict=True):
        if shown.count((name, label)) > 1:
            label = _label(mine, keys)
        found.append(Entry(f"{name} ({label})" if label else name, group))
    return found


def grouped(items: Iterable[Item], by: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items that have the same key, in their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


def _is_same(run: Run, other: Run) -> bool:
    """Tell whether two runs of one name and settings are one: of one seed, or copies of one log."""
    return (run.seed is not None and run.seed == other.seed) or (run.id != "" and run.id == other.id)


OF_STUDY = ("stream.", "network.", "training.")
"""Settings that all runs of a study have in common."""


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, ``budget.epochs``."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value and not all(name.isdigit() for name in value):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def seedless(value: Any, key: str = "") -> Any:
    """Settings without any seed but those of options, which are a study's."""
    if isinstance(value, dict):
        return {name: seedless(inner, name) for name, inner in value.items() if name != "seed" or key == "options"}
    return value


def _apart(mine: Mapping[str, Any], alike: Sequence[Mapping[str, Any]], of_study: Collection[str]) -> list[str]:
    """Settings in which a run differs from others of its name, and its study from others."""
    keys = dict.fromkeys(key for each in alike for key in each)
    apart = [key for key in keys if any(each.get(key) != mine.get(key) for each in alike)]
    return apart + [key for key in mine if key in of_study and key not in apart]


def _short(apart: list[str]) -> list[str]:
    """Without what the name of a stream or of a scenario mostly says."""
    if "stream.name" in apart:
        apart = [key for key in apart if key == "stream.name" or not key.startswith("stream.")]
    if "scenario.name" in apart:
        apart = [key for key in apart if key == "scenario.name" or not key.startswith(("scenario.", "requests"))]
    return apart


def _label(mine: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Words of some settings."""
    return ", ".join(f"{key.removesuffix('.name').split('.')[-1]} {mine.get(key)}" for key in keys)
