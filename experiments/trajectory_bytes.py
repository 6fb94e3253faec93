"""Measure how much memory a recorded trajectory (tasks' updates) needs with each compression, and the added error.

    python -m experiments.trajectory_bytes [--data mnist|digits] [--root DATA] [--adjustment hat|adahat] [--json FILE]

AmnesiacHAT at HAT's published settings, MLP 784-256-100-64 (64-256-100-64 on digits), Adam 1e-3, batch 128, 2 epochs
(20 on digits); then the middle task is unlearned. Columns, means over tasks but for the largest error:

    moved        recorded entries of a task, as a share of the backbone's parameters
    byte         bytes per backbone parameter and task
    max, L2      |θ after − θ before| the task's update is compressed
    JSD          between features after and before the compression, on the task's test data
    accuracy     mean accuracy of all tasks before the request
    request      largest |θ| difference between unlearning with this log and with a lossless log of the same run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from torch import Tensor
from torch.optim import Adam

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.streams import PermutedMNIST
from avalanche_amnesia.evaluation import js_divergence
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.evaluation.probes import features_of
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT, HardAttention
from avalanche_amnesia.trajectory import Trajectory
from experiments.pruned_updates import PrunedTrajectoryPlugin

SETTINGS: dict[str, dict[str, Any]] = {
    "lossless": {},
    "threshold=1e-4": {"threshold": 1e-4},
    "threshold=1e-3": {"threshold": 1e-3},
    "threshold=1e-2": {"threshold": 1e-2},
    "min_active_steps=0.25": {"min_active_steps": 0.25},
    "min_active_steps=0.75": {"min_active_steps": 0.75},
    "dtype=float16": {"dtype": torch.float16},
    "dtype=bfloat16": {"dtype": torch.bfloat16},
    "dtype=int8": {"dtype": torch.int8},
    "threshold=1e-3, int8": {"threshold": 1e-3, "dtype": torch.int8},
}
COLUMNS = ("moved", "byte", "max", "L2", "JSD", "accuracy", "request")


class WithLosslessTwin(Trajectory):
    """Trajectory that also records every update in a second, lossless trajectory, for comparison."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lossless = Trajectory()

    def record(
        self, task: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor], parameters: int | None = None
    ) -> dict[str, Tensor]:
        """Record a task's update in both trajectories; return the committed values."""
        committed = super().record(task, before, after, parameters)
        self.lossless.record(task, before, {**after, **committed})
        return committed


class Watched(PrunedTrajectoryPlugin):
    """Trajectory plugin that also stores the parameters after the last training, before their compression."""

    def __init__(self, **setting: Any) -> None:
        super().__init__(**setting)
        self.trajectory: WithLosslessTwin = WithLosslessTwin(dtype=setting.get("dtype"))
        self.trained: dict[str, Tensor] = {}

    def prune(self, before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Copy the trained ``parameters``, then prune them as in the base class."""
        self.trained = {name: value.detach().clone() for name, value in parameters.items()}
        super().prune(before, parameters)

    def added_errors(self, model: MaskedModel) -> Tensor:
        """Return the model's parameters minus those before the last compression, as one float64 vector."""
        now = dict(model.named_parameters())
        return torch.cat([(now[n].double() - value.double()).reshape(-1) for n, value in self.trained.items()])


def set_values(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the parameters with the same names."""
    for name, value in values.items():
        parameters[name].copy_(value)


@torch.no_grad()
def added_divergence(model: MaskedModel, trained: Mapping[str, Tensor], experience: Any) -> float:
    """Return the JSD between a task's features with current and with ``trained`` (uncompressed) parameters."""
    x, _ = experience.tensors
    mask = model.binary_mask(experience.task_label)
    now = features_of(model, x, mask)
    parameters = dict(model.named_parameters())
    committed = {name: parameter.clone() for name, parameter in parameters.items()}
    set_values(parameters, trained)
    then = features_of(model, x, mask)
    set_values(parameters, committed)
    return float(js_divergence(now, then).mean())


@torch.no_grad()
def mean_accuracy(model: MaskedModel, experiences: Any) -> float:
    """Return the mean accuracy over the tasks' test data."""
    model.eval()
    values = [accuracy(model(e.tensors[0], e.task_label), e.tensors[1]) for e in experiences]
    return sum(values) / len(values)


def run(benchmark: Any, adjustment: Any, epochs: int, setting: dict[str, Any]) -> dict[str, float]:
    """Train all tasks, unlearn the middle one, and return the table's columns by name."""
    torch.manual_seed(0)
    inputs = benchmark.train_stream[0].tensors[0][0].numel()
    model = MaskedModel(MLP(inputs, hidden=(256, 100), features=64))
    plugin = Watched(**setting)
    store = plugin.trajectory
    strategy = AmnesiacHAT(
        model=model,
        optimizer=Adam(model.parameters(), lr=1e-3),
        adjustment=adjustment,
        trajectory=plugin,
        masks=HardAttention(),
        train_mb_size=128,
        train_epochs=epochs,
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
    )
    divergences, errors = [], []
    for train, test in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        strategy.train(train)
        errors.append(plugin.added_errors(model).detach())
        divergences.append(added_divergence(model, plugin.trained, test))
    report = list(store.report().values())
    learned = mean_accuracy(model, benchmark.test_stream)
    request = [len(report) // 2]
    current = {name: p.detach() for name, p in model.backbone.named_parameters(prefix="backbone")}
    values = [t.remove(request, current).values for t in (store, store.lossless)]
    differences = [(values[0].get(n, c) - values[1].get(n, c)).abs().max() for n, c in current.items()]
    strategy.unlearn(request)
    return {
        "moved": fmean(row["share"] for row in report),
        "byte": fmean(row["bytes_per_parameter"] for row in report),
        "max": max(float(error.abs().max()) for error in errors),
        "L2": fmean(float(error.norm()) for error in errors),
        "JSD": sum(divergences) / len(divergences),
        "accuracy": learned,
        "request": float(torch.stack(differences).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["mnist", "digits"], default="mnist")
    parser.add_argument("--root", default=None, help="data root of MNIST (or the variable AMNESIA_DATA)")
    parser.add_argument("--adjustment", choices=["hat", "adahat"], default="hat")
    parser.add_argument("--n-train", type=int, default=6000, help="images per task, of MNIST")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--kept", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.data == "mnist":
        n_train = options.n_train
        benchmark = PermutedMNIST(options.tasks, root=options.root, n_train=n_train, n_test=1000)
    else:
        benchmark = PermutedDigits(options.tasks)
    print("| kept |", " | ".join(COLUMNS), "|")
    print("|" + "---|" * (len(COLUMNS) + 1), flush=True)
    rows = {}
    for name in options.kept:
        rows[name] = run(benchmark, options.adjustment, 2 if options.data == "mnist" else 20, SETTINGS[name])
        print(f"| {name} |", " | ".join(f"{rows[name][column]:.3g}" for column in COLUMNS), "|", flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None, "root": None}, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
