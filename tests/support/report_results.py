"""Results to report: those of the demo at one seed, and more runs made from them.

``tests/lab/logging/report_of_seed_0`` is the demo's output without LwF and hashes; what it did not measure
(chance, controls, relapse, membership, owners …) is invented, with the shapes that observations have.
"""

import copy
import json
from pathlib import Path
from typing import Any

from avalanche_amnesia.lab.report import Results, read_results

FOLDER = Path(__file__).parents[1] / "lab" / "logging" / "report_of_seed_0"
MEASURED_LATER = (
    "capacity_before",
    "chance",
    "full_accuracy",
    "reference_accuracy",
    "accuracy_difference_control",
    "reference_unlearned",
    "relapse",
    "relapse_reference",
    "few_shot",
    "few_shot_reference",
    "membership",
    "membership_reference",
    "distances",
    "jsd_by_task",
    "overlap",
    "owners",
    "owners_before",
    "average_forgetting",
    "backward_transfer",
)


def content() -> dict[str, Any]:
    """Content of ``results.json``, to be changed."""
    read: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())
    return read


def results_with(change: Any, folder: str = "changed") -> Results:
    """Results after a change of their content, without timings."""
    changed = content()
    change(changed)
    return Results(folder, changed["settings"], changed["versions"], changed["strategies"], {})


def another_seed(seed: int) -> Results:
    """The same runs with another seed, every remaining task's accuracy lower by a point per seed."""
    read = read_results(FOLDER)
    settings, strategies = copy.deepcopy((dict(read.settings), dict(read.strategies)))
    settings["seed"] = settings["budget"]["seed"] = seed
    for run in strategies.values():
        for event in run["events"]:
            event["accuracy"] = {task: value - 0.01 * seed for task, value in event["accuracy"].items()}
    return Results(f"runs/seed_{seed}", settings, read.versions, strategies, read.timings)


def events(results: Results, name: str) -> list[dict[str, Any]]:
    """Events of a strategy."""
    found: list[dict[str, Any]] = results.strategies[name]["events"]
    return found
