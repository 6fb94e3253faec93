"""Compare weights of the sparsity loss and settings of the gate, for AmnesiacHAT without a budget of units.

    python experiments/mask_settings.py --root DATA
    python experiments/mask_settings.py --root DATA --streams "permuted MNIST, full" --sparsity-weight 0.3  # one part

Each run learns five tasks without a request, then unlearns the second task with the default compensation. Results are
added to the file; a run that it contains is replaced.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch.optim import Adam

from avalanche_amnesia.benchmarks import PermutedDigits, SplitDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.streams import PermutedMNIST, SplitMNIST
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT, HardAttention
from avalanche_amnesia.unit_graph.backbones import evaluation_mode

STREAMS = {
    "permuted MNIST": (PermutedMNIST, {"n_train": 6000, "n_test": 5000}, {"train_mb_size": 128, "train_epochs": 2}),
    "permuted MNIST, full": (PermutedMNIST, {}, {"train_mb_size": 128, "train_epochs": 2}),
    "split MNIST": (SplitMNIST, {"n_train": 12000, "n_test": 5000}, {"train_mb_size": 128, "train_epochs": 2}),
    "permuted digits": (PermutedDigits, {}, {"train_mb_size": 32, "train_epochs": 10}),
    "split digits": (SplitDigits, {}, {"train_mb_size": 32, "train_epochs": 10}),
    "split digits, 30 steps a task": (SplitDigits, {}, {"train_mb_size": 128, "train_epochs": 10}),
}
GRID = {
    "sparsity_weight": [0.3, 0.5, 0.75],
    "s_max": [100.0, 400.0],
    "embedding_lr": [0.02, 0.05],
    "embedding_init": ["normal", "positive"],
}
COLUMNS = {
    "learned": "mean accuracy of the five tasks",
    "after": "mean accuracy of the remaining four after the request",
    "difference": "what these four gained by the request",
    "in_use": "share of all units in use after five tasks",
}


def accuracies(model, benchmark, tasks):
    found = []
    for experience in benchmark.test_stream:
        if experience.task_label in tasks:
            x, y = task_data(experience)
            with evaluation_mode(model):
                found.append(accuracy(model(x, experience.task_label), y))
    return found


def run(stream, options, seed, root):
    make_benchmark, subset, training = STREAMS[stream]
    benchmark = make_benchmark(5, seed=seed, **subset, **({"root": root} if "MNIST" in stream else {}))
    torch.manual_seed(seed)
    in_features = task_data(benchmark.train_stream[0])[0][0].numel()
    model = MaskedModel(MLP(in_features, hidden=(256, 100), features=64))
    optimizer = Adam(model.parameters(), lr=1e-3)
    strategy = AmnesiacHAT(model=model, optimizer=optimizer, seed=seed, **training, **options)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    remaining = [0, 2, 3, 4]
    learned, before = mean(accuracies(model, benchmark, range(5))), mean(accuracies(model, benchmark, remaining))
    in_use = float(model.cumulative_mask().float().mean())
    strategy.unlearn([1])
    after = mean(accuracies(model, benchmark, remaining))
    return {"learned": learned, "after": after, "difference": after - before, "in_use": in_use}


def table(results):
    lines = ["# Sparsity and gate of AmnesiacHAT", "", "MLP *d*-256-100-64, Adam 1e-3, five tasks; means in per cent."]
    lines += ["The request names the second task.", ""]
    lines += [f"* {name}: {meaning}" for name, meaning in COLUMNS.items()]
    for stream in STREAMS:
        rows = [row for row in results if row["stream"] == stream]
        if not rows:
            continue
        seeds = sorted({row["seed"] for row in rows})
        lines += ["", f"## {stream[0].upper() + stream[1:]} (seeds {seeds})", ""]
        lines += ["| " + " | ".join([*GRID, *COLUMNS]) + " |", "|---" * (len(GRID) + len(COLUMNS)) + "|"]
        for values in sorted({tuple(row["settings"].values()) for row in rows}):
            of_values = [row for row in rows if tuple(row["settings"].values()) == values]
            cells = [value if isinstance(value, str) else f"{value:g}" for value in values]
            cells += [f"{100 * mean(row[name] for row in of_values):.2f}" for name in COLUMNS]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    for name, values in GRID.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(values[0]), nargs="+", default=values)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/mask_settings"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = options.output.with_suffix(".json")
    results = json.loads(found.read_text()) if found.exists() else []
    for stream, seed, values in product(options.streams, options.seeds, product(*(vars(options)[n] for n in GRID))):
        what = {"stream": stream, "settings": dict(zip(GRID, values, strict=True)), "seed": seed}
        row = what | run(stream, {"masks": HardAttention(**what["settings"])}, seed, options.root)
        print(row, flush=True)
        results = [other for other in results if not what.items() <= other.items()] + [row]
        found.write_text(json.dumps(results, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
