"""Runs to report: those of the demo at one seed, and more runs made from them.

``tests/lab/report/report_of_seed_0`` has the numbers of a demo without LwF and hashes, under short names; what it did
not measure (chance, controls, relapse, membership, owners …) is invented, with the shapes that logs have.
"""

import json
from pathlib import Path
from typing import Any

from avalanche_amnesia.evaluation import floor_ratio
from avalanche_amnesia.lab.report.reading import Cost, Moment, Numbers, Run

FOLDER = Path(__file__).parents[1] / "lab" / "report" / "report_of_seed_0"
BY_TASK = {
    "accuracy": "Top1_Acc_Exp",
    "full_accuracy": "Accuracy_full",
    "reference_accuracy": "Accuracy_reference",
    "unlearned_accuracy": "UnlearnedAccuracy",
    "reference_unlearned": "UnlearnedAccuracy_reference",
    "chance": "UnlearnedAccuracy_chance",
    "relapse": "Relapse",
    "relapse_reference": "Relapse_reference",
    "few_shot": "FewShot",
    "few_shot_reference": "FewShot_reference",
    "membership": "Membership",
    "membership_reference": "Membership_reference",
}
"""Name in the file → metric, task by task and as their mean."""
NUMBERS = {
    "reference_unlearned_accuracy": "UnlearnedAccuracy_reference",
    "accuracy_difference": "AccuracyDifference",
    "accuracy_difference_control": "AccuracyDifference_control",
    "average_forgetting": "Forgetting",
    "backward_transfer": "BackwardTransfer",
    "capacity": "Capacity",
    "trajectory_bytes": "TrajectoryBytes",
}
"""Name in the file → metric of all tasks."""
MEASURED_LATER = (
    *("capacity_before", "accuracy_difference_control", "average_forgetting", "backward_transfer"),
    *(name for name in BY_TASK if name not in ("accuracy", "unlearned_accuracy")),
    *("distances", "jsd_by_task", "overlap", "owners", "owners_before"),
)


def content() -> dict[str, Any]:
    """Numbers of the file, to be changed."""
    read: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())
    return read


def runs_of(content: dict[str, Any], folder: str | Path = FOLDER, timings: bool = False) -> list[Run]:
    """Runs of such content, as their logs would tell them; without seconds unless they are asked for."""
    seconds = json.loads((FOLDER / "timings.json").read_text()) if timings else {}
    return [
        Run(
            folder=Path(folder),
            name=name,
            settings=content["settings"],
            seed=content["settings"]["seed"],
            versions=content["versions"],
            moments=[_moment(event) for event in run["events"]],
            records=[
                {**record, "claim": record["plan"]["claim"], "signature": "not signed"} for record in run["unlearnings"]
            ],
            costs=[Cost(of["after_task"], of["unlearn"], of["retrain"]) for of in seconds.get(name, ())],
        )
        for name, run in content["strategies"].items()
    ]


def runs_with(change: Any, folder: str = "changed") -> list[Run]:
    """Runs after a change of their content."""
    changed = content()
    change(changed)
    return runs_of(changed, folder)


def another_seed(seed: int) -> list[Run]:
    """The same runs with another seed, every remaining task's accuracy lower by a point per seed."""
    changed = content()
    changed["settings"]["seed"] = changed["settings"]["budget"]["seed"] = seed
    for run in changed["strategies"].values():
        for event in run["events"]:
            event["accuracy"] = {task: value - 0.01 * seed for task, value in event["accuracy"].items()}
    return runs_of(changed, f"runs/seed_{seed}", timings=True)


def _moment(event: dict[str, Any]) -> Moment:
    numbers: Numbers = {}
    for key, metric in BY_TASK.items():
        by_task = {int(task): value for task, value in (event.get(key) or {}).items()}
        if by_task:
            numbers[metric] = {None: sum(by_task.values()) / len(by_task), **by_task}
    for key, metric in NUMBERS.items():
        if event.get(key) is not None:
            numbers.setdefault(metric, {})[None] = event[key]
    for name, value in (*(event.get("jsd") or {}).items(), *(event.get("distances") or {}).items()):
        numbers.setdefault(name, {})[None] = value
        if "_floor_" not in name:
            numbers[f"{name}_tasks"] = {None: len(event["unlearned"])}
    for name in [name for name in numbers if name.endswith("_floor_order")]:
        distance, floor = numbers[name.removesuffix("_floor_order")][None], numbers[name][None]
        ratio = floor_ratio(distance, floor)
        if ratio is not None:
            numbers[name.replace("_floor_", "_ratio_")] = {None: ratio}
    for name, by_task in (event.get("jsd_by_task") or {}).items():
        numbers.setdefault(name, {}).update({int(task): value for task, value in by_task.items()})
    overlap = event.get("overlap") or {}
    rows = [[task, *row] for task, row in zip(overlap.get("tasks", ()), overlap.get("shares", ()), strict=True)]
    before = {} if event.get("capacity_before") is None else {"CapacityBefore": {None: event["capacity_before"]}}
    return Moment(
        task=event["task"],
        remaining=tuple(event["remaining"]),
        unlearned=tuple(event["unlearned"]),
        unlearned_now=tuple(event["unlearned_now"]),
        claim=event["claim"],
        numbers=numbers | _owners("Owners", event.get("owners")),
        first=before | _owners("OwnersBefore", event.get("owners_before")),
        tables={"Figure/Overlap/table": [["task", *overlap["tasks"]], *rows]} if rows else {},
    )


def _owners(kind: str, layers: dict[str, dict[str, float]] | None) -> Numbers:
    found: Numbers = {}
    for layer, shares in (layers or {}).items():
        for owner, share in shares.items():
            name, task = (f"{kind}/{layer}", int(owner)) if owner.isdigit() else (f"{kind}/{layer}/{owner}", None)
            found.setdefault(name, {})[task] = share
    return found
