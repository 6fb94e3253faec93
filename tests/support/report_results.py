"""Runs to report: those of the demo at one seed, and more runs made from them.

``tests/lab/report/report_of_seed_0/runs.json`` has runs as they are read from logs. Their numbers are those of a demo
without LwF and hashes; what it did not measure (chance, controls, relapse, membership, owners …) is invented.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from avalanche_amnesia.lab.report.reading import Cost, Evaluation, Run

FOLDER = Path(__file__).parents[1] / "lab" / "report" / "report_of_seed_0"


def runs_of_demo(folder: str | Path = FOLDER) -> list[Run]:
    """The runs of the file, to be changed."""
    return [_run(of, Path(folder)) for of in json.loads((FOLDER / "runs.json").read_text())]


def _run(of: dict[str, Any], folder: Path) -> Run:
    costs = [Cost(**cost) for cost in of.pop("costs")]
    of["records"] = [{**record, "claim": record["plan"]["claim"]} for record in of["records"]]
    return Run(folder=folder, **{**of, "moments": [_moment(**moment) for moment in of["moments"]], "costs": costs})


def _moment(numbers: dict[str, Any], **more: Any) -> Evaluation:
    more |= {name: tuple(more[name]) for name in ("remaining", "unlearned", "unlearned_now")}
    by_task = {name: {int(task) if task else None: v for task, v in of.items()} for name, of in numbers.items()}
    return Evaluation(numbers=by_task, **more)


def another_seed(seed: int) -> list[Run]:
    """The same runs with another seed, every remaining task's accuracy lower by a point per seed."""
    runs = runs_of_demo(f"runs/seed_{seed}")
    for run in runs:
        run.settings["seed"] = run.settings["budget"]["seed"] = seed
        for moment in run.moments:
            accuracy = moment.numbers["Top1_Acc_Exp"]
            accuracy |= {task: value - 0.01 * seed for task, value in accuracy.items()}
    return [replace(run, seed=seed) for run in runs]
