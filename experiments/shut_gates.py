"""Measure accuracy when gates below a threshold are treated as closed (0), for several thresholds.

    python -m experiments.shut_gates --root DATA --seeds 101 102    # a JSON file for each of these seeds, and the table
    python -m experiments.shut_gates --seeds                        # only the table

Five tasks, evaluated on held-out training images; test images are not used.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from torch.optim import SGD, Adam

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.benchmarks.families import Images, permuted, split, stratified_positions
from avalanche_amnesia.contrib.streams.image_sets import Standardise, load, rotated
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP, MaskedModel, gate
from avalanche_amnesia.training import HAT, AmnesiacHAT, HardAttention
from avalanche_amnesia.unit_graph.backbones import evaluation_mode

SHUT = [0.0, 1e-15, 1e-12, 1e-8, 1e-6]
DEFAULT = gate.SHUT
STREAMS = {
    "permuted MNIST": ("MNIST", 4000, lambda images, seed: permuted(images, 5, seed)),
    "rotated MNIST": ("MNIST", 4000, lambda images, seed: rotated(images, 5, None)),
    "split Fashion-MNIST": ("FashionMNIST", 12000, lambda images, seed: split(images, 5, None)),
}
METHODS = {
    "AmnesiacHAT, Adam": (AmnesiacHAT, lambda parameters: Adam(parameters, lr=1e-3, fused=True)),
    "HAT as published, SGD": (HAT, lambda parameters: SGD(parameters, lr=0.05)),
}
OUTPUT = Path("experiments/results/shut_gates")


def make_benchmark(stream, seed, root):
    data, n_train, tasks = STREAMS[stream]
    x, y = load(data, root, False)[0]
    chosen = stratified_positions(y, n_train + 2000, seed, "shut gates")
    validating = chosen[stratified_positions(y[chosen], 2000, seed, "validation")]
    training = chosen[~torch.isin(chosen, validating)]
    images = Images((x[training], y[training]), (x[validating], y[validating]), before=(Standardise(0, 255),))
    return tasks(replace(images, after=(Standardise(0.2, 0.33),)), seed)


def run(stream, method, shut, seed, root):
    gate.SHUT = shut
    benchmark, (kind, optimizer) = make_benchmark(stream, seed, root), METHODS[method]
    torch.manual_seed(seed)
    model = MaskedModel(MLP(784, hidden=(256, 100), features=64))
    fixed = {} if kind is HAT else {"masks": HardAttention(sparsity_weight=0.5, s_max=100.0, embedding_lr=0.02)}
    fixed |= {"train_mb_size": 64, "train_epochs": 10}
    strategy = kind(model=model, optimizer=optimizer(model.parameters()), seed=seed, **fixed)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    found = []
    for experience in benchmark.test_stream:
        x, y = task_data(experience)
        with evaluation_mode(model):
            found.append(accuracy(model(x, experience.task_label), y))
    return mean(found)


def table(rows):
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        "# Gates that count as shut",
        "",
        "`python -m experiments.shut_gates`: five tasks, MLP 784-256-100-64, batch 64, 10 epochs; 4,000 training",
        "images a task (split: 12,000 for all). Accuracy in per cent on 2,000 other training images: mean of the five",
        f"tasks after the last one, mean ± standard deviation over the seeds {seeds[0]} to {seeds[-1]}; Δ: to no",
        "threshold, by seed.",
        "",
        "| stream | method | " + " | ".join("none" if shut == 0 else f"{shut:g}, Δ" for shut in SHUT) + " |",
        "|---" * (len(SHUT) + 2) + "|",
    ]
    for stream, method in product(STREAMS, METHODS):
        by_shut = {
            shut: {
                row["seed"]: 100 * row["accuracy"]
                for row in rows
                if (row["stream"], row["method"], row["shut"]) == (stream, method, shut)
            }
            for shut in SHUT
        }
        cells = []
        for shut, found in by_shut.items():
            cell = f"{mean(found.values()):.2f} ± {stdev(found.values()):.2f}"
            if shut:
                differences = [value - by_shut[0.0][seed] for seed, value in found.items()]
                cell += f", {mean(differences):+.2f} ± {stdev(differences):.2f}"
            cells.append(cell)
        lines.append(f"| {stream} | {method} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"The package reads gates up to {DEFAULT:g} as 0: the largest one whose loss stays within a "
        "deviation on every stream.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[101, 102, 103, 104, 105])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        rows = []
        for stream, method, shut in product(STREAMS, METHODS, SHUT):
            found = run(stream, method, shut, seed, options.root)
            rows.append({"stream": stream, "method": method, "shut": shut, "seed": seed, "accuracy": found})
            print(rows[-1], flush=True)
        OUTPUT.with_name(f"{OUTPUT.name}_seed{seed}.json").write_text(json.dumps(rows, indent=1) + "\n")
    files = sorted(OUTPUT.parent.glob(f"{OUTPUT.name}_seed*.json"))
    OUTPUT.with_suffix(".md").write_text(table([row for file in files for row in json.loads(file.read_text())]))


if __name__ == "__main__":
    main()
