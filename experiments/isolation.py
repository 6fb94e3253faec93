"""Cost of exact unlearning: HAT that shares all units against pools of units, before and after a request.

python -m experiments.isolation --root DATA --seeds 0 1 2 --output experiments/results/isolation

Ten permuted tasks are learned, three of them (1, 4 and 7) are unlearned at once, and three new ones are learned, in
this net and in one that kept everything. The net has ten slots: full before the request.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch.optim import Adam

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.contrib.streams import PermutedMNIST
from avalanche_amnesia.evaluation import accuracy
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT, HardAttention
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import HATPlugin

LEARNED, REQUESTED, NEW = range(10), (1, 4, 7), (11, 14, 17)
PERMANENT = (0, 2, 3, 5, 8)
CONTENDERS = {
    "sharing": ({}, ()),
    "pools": ({"isolation": Pools(slots=10)}, ()),
    "pools, half permanent": ({"isolation": Pools(slots=10)}, PERMANENT),
}
COLUMNS = {
    "learned": "accuracy, 10 tasks learned",
    "before": "remaining 7, before the request",
    "after": "remaining 7, after it",
    "new": "3 new tasks after it",
    "new_full": "3 new tasks without it",
    "claim": "claim",
}


@torch.no_grad()
def accuracies(strategy, benchmark, tasks):
    strategy.model.eval()
    experiences = [benchmark.test_stream[task] for task in tasks]
    return [accuracy(strategy.model(e.tensors[0], e.task_label), e.tensors[1]) for e in experiences]


def make_benchmark(options, seed, permanent):
    if options.data == "digits":
        stream = PermutedDigits(18, n_train=options.n_train, seed=seed)
    else:
        stream = PermutedMNIST(18, root=options.root, n_train=options.n_train, n_test=1000, seed=seed)
    return with_unlearning(stream, {}, permanent)


def run(contender, options, seed):
    settings, permanent = CONTENDERS[contender]
    benchmark = make_benchmark(options, seed, permanent)
    torch.manual_seed(seed)
    in_features = benchmark.train_stream[0].tensors[0][0].numel()
    model = MaskedModel(MLP(in_features, hidden=(options.width,), features=options.width))
    strategy = AmnesiacHAT(
        model=model,
        optimizer=Adam(model.parameters(), lr=options.lr, fused=True),
        train_mb_size=options.batch,
        train_epochs=options.epochs,
        masks=HardAttention(),  # as HAT was published with: sharing is at its best with them where epochs are many
        seed=seed,
        **settings,
    )
    for task in LEARNED:
        strategy.train(benchmark.train_stream[task])
    learned = accuracies(strategy, benchmark, LEARNED)
    remaining = [task for task in LEARNED if task not in REQUESTED]
    full = deepcopy(strategy)
    record = strategy.unlearn(REQUESTED)
    after = accuracies(strategy, benchmark, remaining)
    if settings:
        masking = find_plugin(full, HATPlugin)
        masking.isolation = replace(masking.isolation, when_full="share")
    for task in NEW:
        strategy.train(benchmark.train_stream[task])
        full.train(benchmark.train_stream[task])
    return {
        "learned": mean(learned),
        "before": mean(learned[task] for task in remaining),
        "after": mean(after),
        "new": mean(accuracies(strategy, benchmark, NEW)),
        "new_full": mean(accuracies(full, benchmark, NEW)),
        "claim": record.claim,
    }


def table(options, results):
    lines = [
        "# What exact unlearning costs",
        "",
        f"Permuted {options.data}, {options.n_train} training images a task; MLP with two layers of",
        f"{options.width} units, Adam {options.lr}, batch {options.batch}, {options.epochs} epochs.",
        "Masks at HAT's published settings.",
        f"Mean of seeds {options.seeds}, in per cent.",
        "Without the request the ten pools are full: a new task finds no unit of its own there, and sharing HAT some.",
        "",
        "| contender | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for contender, of_seeds in results.items():
        cells = [
            of_seeds[0][name] if name == "claim" else f"{100 * mean(row[name] for row in of_seeds):.2f}"
            for name in COLUMNS
        ]
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--data", choices=["mnist", "digits"], default="mnist")
    parser.add_argument("--n-train", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=None, help="writes OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for contender in CONTENDERS:
        results[contender] = []
        for seed in options.seeds:
            results[contender].append(run(contender, options, seed))
            print(contender, seed, results[contender][-1], flush=True)
    print(table(options, results))
    if options.output is not None:
        settings = {name: value for name, value in vars(options).items() if name not in ("root", "output")}
        text = json.dumps({"settings": settings, "results": results}, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text)
        options.output.with_suffix(".md").write_text(table(options, results))


if __name__ == "__main__":
    main()
