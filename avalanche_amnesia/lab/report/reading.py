"""Read runs from their logs, and group runs that differ only in the seed."""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from avalanche_amnesia.audit.record import NOT_OBEYED, UnlearningRecord
from avalanche_amnesia.audit.words import claim_in_words
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, JSONRunError, lines_of
from avalanche_amnesia.logging.names import EVENT, EVENTS, ITERATION, TASK

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Numbers = dict[str, dict[int | None, float]]
"""Name of a metric → task, or None for all tasks → number."""
_ACCURACY = "Top1_Acc_Exp"
_COST = ("SecondsToUnlearn/eval_phase/test_stream", "SecondsToRetrain/eval_phase/test_stream")
_NAME = re.compile(r"(?P<name>(?!.*/train_(phase|stream)).+?)(/eval_phase/\w+)?(/Task(?P<task>\d+))?(/Exp\d+)?")
"""Logged name of an evaluation metric; the parts for phase, stream and experience are ignored."""
_parse = lru_cache(10_000)(_NAME.fullmatch)  # all runs of a study log the same names
_LEAST, _MOST = 1e-9, 1e18
_AXES = (ITERATION, TASK, EVENT)
_LISTED = re.compile(r"\d+(, \d+)*")
"""Pattern of a list of tasks in the table of events; other text in that column describes samples of a task."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run after a task: remaining and unlearned tasks, and the metrics measured at that time.

    Attributes:
        task: the task just trained.
        remaining: remaining tasks, in training order.
        unlearned: all tasks unlearned so far, in the order of unlearning.
        unlearned_now: tasks unlearned since the previous evaluation.
        parts: descriptions of all samples of remaining tasks unlearned so far, one per request.
        parts_now: descriptions of samples unlearned since the previous evaluation.
        claim: claim of the last unlearning so far.
        numbers: metrics after the last event (end of a task or unlearning); the last value counts.
        capacity_before: free capacity before the first request since the previous evaluation.
    """

    task: int
    remaining: tuple[int, ...]
    unlearned: tuple[int, ...]
    unlearned_now: tuple[int, ...]
    claim: str | None
    numbers: Numbers
    parts: tuple[str, ...] = ()
    parts_now: tuple[str, ...] = ()
    capacity_before: float | None = None

    def number(self, name: str, task: int | None = None) -> float | None:
        """Return a metric of one task, or of all tasks if ``task`` is None; return None if it was not measured."""
        return self.numbers.get(name, {}).get(task)

    def by_task(self, name: str) -> dict[int, float]:
        """Return a metric's values by task, for all tasks with a measured value."""
        return {task: value for task, value in self.numbers.get(name, {}).items() if task is not None}

    @property
    def accuracy(self) -> dict[int, float]:
        """Return the test accuracy of the tasks not unlearned, by task."""
        found = self.by_task(_ACCURACY)
        return {task: found[task] for task in self.remaining if task in found}

    @property
    def accuracies(self) -> dict[int, float]:
        """Return test accuracies by task; an unlearned task is tested with its head from before the unlearning."""
        return self.accuracy | self.by_task("UnlearnedAccuracy")


@dataclass(frozen=True)
class Cost:
    """Seconds for one unlearning, and for training a model from scratch without the unlearned tasks."""

    after: int
    unlearn: float
    retrain: float


@dataclass(frozen=True)
class Run:
    """A training run with its evaluations, unlearning records and costs, read from its log.

    Attributes:
        folder: folder of the log.
        name: name given to the logger, else the strategy's name.
        settings: settings given to the logger, else the strategy's settings.
        seed: seed, or None if the log has none.
        versions: package → version.
        moments: evaluations between tasks, in order.
        records: records of its unlearnings, with ``signature``: ``signed, not checked`` or ``not signed``.
        costs: costs of its unlearnings.
        id: random identifier from the logger.
        ended: True if the log ends without an error; False if the run was stopped or is still running.
        unrecorded: number of unlearnings without a record.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    seed: Any
    versions: Mapping[str, str]
    moments: Sequence[Evaluation]
    records: Sequence[Mapping[str, Any]] = ()
    costs: Sequence[Cost] = ()
    id: str = ""
    ended: bool = True
    unrecorded: int = 0

    @property
    def last(self) -> Evaluation:
        """Return the last evaluation of the run."""
        return self.moments[-1]

    @property
    def unlearns(self) -> bool:
        """Return False for a control run, which records all requests to unlearn but unlearns nothing; else True."""
        return not self.records or not all(NOT_OBEYED in record["plan"]["reasons"] for record in self.records)

    @property
    def seed_text(self) -> str:
        """Return the seed as text: ``seed 3``, or ``the run`` without a seed."""
        return "the run" if self.seed is None else f"seed {self.seed}"


@dataclass(frozen=True)
class Spread:
    """Mean, minimum and maximum of a number over seeds."""

    mean: float
    low: float
    high: float


Get = Callable[[Evaluation], float | None]


@dataclass(frozen=True)
class Entry:
    """A strategy with fixed settings, and one run per seed."""

    name: str
    runs: Sequence[Run]

    @property
    def first(self) -> Run:
        """Return the run of the first seed."""
        return self.runs[0]

    @property
    def after(self) -> list[int]:
        """Return the tasks after which the run was evaluated, in training order."""
        return [moment.task for moment in self.first.moments]

    @property
    def requests(self) -> dict[int, Evaluation]:
        """Return the first run's evaluations right after a request to unlearn, by evaluation number (from 0)."""
        return {at: moment for at, moment in enumerate(self.first.moments) if moment.unlearned_now or moment.parts_now}

    @property
    def costs(self) -> list[Cost]:
        """Return the seconds to unlearn and to retrain, for every unlearning in the runs of all seeds."""
        return [cost for run in self.runs for cost in run.costs]

    def spread(self, get: Get, position: int = -1) -> Spread | None:
        """Apply ``get`` to evaluation number ``position`` (-1: last, of whole runs) of each run; return its spread."""
        needed = position + 1 or max(len(run.moments) for run in self.runs)  # a run that stopped has no last one
        return spread(get(run.moments[position]) for run in self.runs if len(run.moments) >= needed)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean, minimum and maximum of the values except None; return None if there are no values."""
    if not (there := [value for value in values if value is not None]):
        return None
    low, high = min(there), max(there)
    return Spread(min(max(sum(there) / len(there), low), high), low, high)  # limits rounding errors


def plan_values(runs: Sequence[Run], name: str) -> list[str]:
    """Collect the lists ``name`` (such as ``reasons``) of all unlearning plans; return their distinct values."""
    plans = (record["plan"] for run in runs for record in run.records)
    return list(dict.fromkeys(entry for plan in plans for entry in plan.get(name, ())))


def number(name: str, task: int | None = None) -> Get:
    """Return a function that reads a metric, of ``task`` or (None) of all tasks, from an evaluation."""
    return lambda moment: moment.number(name, task)


def read_runs(folder: str | Path) -> list[Run]:
    """Read all runs in and below a folder, sorted by path, except runs without an evaluation.

    Args:
        folder: folder with ``run.jsonl`` of a :class:`~avalanche_amnesia.lab.logging.JSONLogger` at any depth.

    Raises:
        JSONRunError: a log is broken.
        ValueError: no run was evaluated after a task.
    """
    found = [read_run(file.parent) for file in sorted(Path(folder).rglob(RUN_FILE))]
    if not (there := [run for run in found if run.moments]):
        raise ValueError(f"{folder} holds no {RUN_FILE} of an evaluated run: give folders of amnesia run or JSONLogger")
    return there


def read_run(folder: str | Path) -> Run:
    """Read one run from the log in its folder.

    A row with the table of events ends an evaluation, because the logger writes it after each evaluation between tasks.

    Args:
        folder: folder with ``run.jsonl``.

    Raises:
        JSONRunError: the folder has no log, or the log is broken.
    """
    folder = Path(folder)
    head, strategy, ended = dict[str, Any](), dict[str, Any](), False
    records, reader = list[dict[str, Any]](), _Reader()
    for number, line in enumerate(lines_of(folder), 1):
        try:
            match line["kind"]:
                case "run":
                    head = {name: line[name] for name in ("id", "name", "config")}
                case "settings":
                    strategy = line["settings"]
                case "record":
                    text = (folder / line["path"]).read_text()
                    record, signed = UnlearningRecord.from_json(text), "signature" in json.loads(text)
                    signature = "signed, not checked" if signed else "not signed"
                    records.append({**asdict(record), "claim": claim_in_words(record), "signature": signature})
                case "row":
                    reader.add_row(line["values"])
                case "end":
                    ended = line["exit_code"] == 0
        except FileNotFoundError as error:
            told = f"line {number} of {folder / RUN_FILE} names {line['path']}, which is not there"
            raise JSONRunError(told) from error
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, LookupError) else error
            raise JSONRunError(f"line {number} of {folder / RUN_FILE} is broken: {why}") from error
    settings = head["config"] or {n: of for n, of in strategy.items() if n not in ("method", "seed", "versions")}
    return Run(
        folder=folder,
        name=head["name"] or strategy.get("method", folder.name),
        settings=settings,
        seed=_scalar(settings.get("seed", strategy.get("seed"))),
        versions=strategy.get("versions", {}),
        moments=reader.moments,
        records=records,
        costs=reader.costs,
        id=head["id"],
        ended=ended,
        unrecorded=max(0, reader.claims - len(records)),
    )


class _Reader:
    """Reader of a run's log, row by row: collects the run's evaluations between tasks, and costs of its unlearnings."""

    def __init__(self) -> None:
        self.moments: list[Evaluation] = []
        self.costs: list[Cost] = []
        self.claims = 0
        self._numbers: Numbers = {}
        self._capacity_before: float | None = None
        self._event = self._ended = -1

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a row of the log; if the row contains the table of events, it ends the current evaluation."""
        if row[EVENT] != self._event:  # drop metrics from before the event: their task may be unlearned now
            self._numbers, self._event = {}, row[EVENT]
        for key, value in row.items():
            if is_number(value) and key not in _AXES and (found := _parse(key)):
                task = None if found["task"] is None else int(found["task"])
                self._numbers.setdefault(found["name"], {})[task] = value
        if self._capacity_before is None:
            self._capacity_before = self._numbers.get("CapacityBefore", {}).get(None)
        if all(map(is_number, map(row.get, _COST))):
            self.costs.append(Cost(row[TASK], *(max(row[name], _LEAST) for name in _COST)))
        if EVENTS in row:
            columns = row[EVENTS]["columns"]
            self._close([dict(zip(columns, map(_scalar, cells), strict=True)) for cells in row[EVENTS]["data"]])

    def _close(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self._ended == self._event:  # a second evaluation replaces the first
            self._capacity_before = self.moments.pop().capacity_before
        before = self.moments[-1] if self.moments else None
        trained, removed, parts = dict[int, None](), dict[int, None](), list[str]()
        for event in events:
            if event["what"] == "trained":
                removed.pop(event["task"], None)
                trained[event["task"]] = None
            if _LISTED.fullmatch(event["unlearned"] or ""):
                removed |= dict.fromkeys(_parse_tasks(event["unlearned"]))
            elif event["unlearned"]:
                parts.append(event["unlearned"])
        self.claims = sum(event["claim"] is not None for event in events)
        listed = events[-1]["remaining"]  # None: the strategy has no ledger
        remaining = tuple(task for task in trained if task not in removed) if listed is None else _parse_tasks(listed)
        # The log of a resumed run may lack earlier requests; their tasks still have an old head.
        read = [task for task in self._numbers.get("UnlearnedAccuracy", {}) if task is not None]
        earlier = [task for task in read if task not in removed and task not in remaining]
        self.moments.append(
            Evaluation(
                task=events[-1]["task"],
                remaining=remaining,
                unlearned=(*earlier, *removed),
                unlearned_now=tuple(task for task in removed if before is None or task not in before.unlearned),
                claim=next((event["claim"] for event in reversed(events) if event["claim"]), None),
                numbers={name: dict(of) for name, of in self._numbers.items()},
                parts=tuple(parts),
                parts_now=tuple(parts[0 if before is None else len(before.parts) :]),
                capacity_before=self._capacity_before,
            )
        )
        self._capacity_before, self._ended = None, self._event


def is_number(value: object) -> bool:
    """Return True for a number between -1e18 and 1e18; False for bools, NaN and all other values."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def _scalar(value: object) -> Any:
    """Return a logged number, text or bool unchanged; None for any other value, such as NaN or a number above 1e18."""
    return value if is_number(value) or isinstance(value, (str, bool)) else None


def _parse_tasks(listed: str | None) -> tuple[int, ...]:
    return tuple(map(int, listed.split(", "))) if listed else ()


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Group runs that differ only in the seed, in the order of the runs; raise ValueError if a run occurs twice.

    If the runs belong to several studies (stream, network or budget differ), names include these settings.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    groups = group_by(runs, lambda run: (run.name, json.dumps(drop_seeds(run.settings), sort_keys=True)))
    for same, run in (pair for group in groups.values() for pair in combinations(group, 2)):
        # An equal identifier means copies of one log.
        if (run.seed is not None and run.seed == same.seed) or (run.id != "" and run.id == same.id):
            raise ValueError(f"{same.folder} and {run.folder} hold the same run of {run.seed_text}: give each run once")
    named = [name for name, _ in groups]
    flats = [flatten(drop_seeds(group[0].settings)) for group in groups.values()]
    found = []
    for name, mine, group in zip(named, flats, groups.values(), strict=True):
        alike = [each for other, each in zip(named, flats, strict=True) if other == name]
        keys = dict.fromkeys(key for each in alike for key in each)
        apart = [key for key in keys if any(each.get(key) != mine.get(key) for each in alike)]
        of_study = [key for key in mine if key.startswith(OF_STUDY) and key not in apart]
        apart += [key for key in of_study if any(each.get(key, mine[key]) != mine[key] for each in flats)]
        if "scenario.name" in apart:  # the requests follow from the scenario
            apart = [key for key in apart if key != "requests"]
        label = ", ".join(f"{key.removesuffix('.name').split('.')[-1]} {mine.get(key)}" for key in apart)
        found.append(Entry(f"{name} ({label})" if label else name, group))
    return found


def group_by(items: Iterable[Item], by: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by key; keys and items keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


OF_STUDY = ("stream.", "network.", "training.")
"""Prefixes of the settings that all runs of a study share."""


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names such as ``training.epochs``."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value and not all(str(name).isdigit() for name in value):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def drop_seeds(value: Any, key: str = "") -> Any:
    """Return settings without seeds. Seeds inside ``options`` stay, because they are a part of the study."""
    if isinstance(value, dict):
        return {name: drop_seeds(inner, name) for name, inner in value.items() if name != "seed" or key == "options"}
    return value
