"""Masks with a budget beside masks under a regulariser: which of them learns, and keeps, more on streams of any data.

    python -m experiments.mask_budget --root DATA --seeds 11                        # on the test images
    python -m experiments.mask_budget --root DATA --seeds 101 102 --validation      # on held out training images

Adds to ``experiments/results/mask_budget.json`` (``…_validation.json``) and writes the table beside it.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch.optim import Adam

from avalanche_amnesia.baselines import Independent, NetworkPerTask
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import HAT, AmnesiacHAT, HardAttention
from experiments.streams import STREAMS, accuracy_on

PRICE = HardAttention(sparsity_weight=0.5, s_max=100.0, embedding_lr=0.02)
METHODS = {
    "AmnesiacHAT": (AmnesiacHAT, MaskedModel, {}),
    "AmnesiacHAT, reuse 1": (AmnesiacHAT, MaskedModel, {"reuse": 1.0}),
    "AmnesiacHAT, reuse 0": (AmnesiacHAT, MaskedModel, {"reuse": 0.0}),
    "AmnesiacHAT, λ .5": (AmnesiacHAT, MaskedModel, {"masks": PRICE}),
    "AmnesiacHAT, λ .5, trained heads": (AmnesiacHAT, MaskedModel, {"masks": PRICE, "fit_head": False}),
    "AmnesiacHAT, pools": (AmnesiacHAT, MaskedModel, {"isolation": "pools"}),
    "HAT, published masks": (HAT, MaskedModel, {}),
    "Independent": (Independent, NetworkPerTask, {}),
}
COLUMNS = {
    "remaining": "mean accuracy of the tasks that remain, at the end (HAT obeys no request: of the same tasks)",
    "learned": "mean accuracy of each task when it had just been trained, of those that were not requested at once",
    "first": "the same of the first task",
    "free": "share of the units that no remaining task uses at the end",
}
OUTPUT = Path("experiments/results/mask_budget")


def run(stream, method, seed, root, validation):
    settings = STREAMS[stream]
    kind, wrap, options = METHODS[method]
    benchmark = settings.benchmark(root, seed, validation)
    torch.manual_seed(seed)
    model = wrap(settings.network())
    optimizer = Adam(model.parameters(), lr=settings.lr)
    strategy = kind(model=model, optimizer=optimizer, seed=seed, **settings.training, **options)
    learned = {}
    for trained, tested in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        strategy.train(trained)
        if tested.task_label in model.tasks:
            learned[tested.task_label] = accuracy_on(model, tested)
    remaining = [
        accuracy_on(model, tested) for tested in benchmark.test_stream if tested.task_label not in settings.requested
    ]
    free = 1 - float(model.cumulative_mask().float().mean()) if isinstance(model, MaskedModel) else None
    return {"remaining": mean(remaining), "learned": mean(learned.values()), "first": learned[0], "free": free}


def cell(values):
    return "–" if None in values else f"{100 * mean(values):.1f}"


def table(rows, validation):
    where = "held out training images" if validation else "test images"
    lines = [f"# Budget and regulariser of masks, on {where}", ""]
    lines += ["Streams, networks and requests: `experiments/streams.py`. Means over the seeds, in per cent.", ""]
    lines += [f"* {name}: {meaning}" for name, meaning in COLUMNS.items()]
    for stream in STREAMS:
        here = [row for row in rows if row["stream"] == stream]
        if not here:
            continue
        lines += ["", f"## {stream[0].upper() + stream[1:]}", ""]
        lines += ["| method | seeds | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
        for method in METHODS:
            mine = [row for row in here if row["method"] == method]
            if mine:
                cells = [cell([row[name] for row in mine]) for name in COLUMNS]
                lines.append(f"| {method} | {', '.join(str(row['seed']) for row in mine)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[11])
    parser.add_argument("--validation", action="store_true", help="on held out training images: to choose settings")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = options.output.with_name(options.output.name + "_validation") if options.validation else options.output
    found = output.with_suffix(".json")
    rows = json.loads(found.read_text()) if found.exists() else []
    for stream, method, seed in product(options.streams, options.methods, options.seeds):
        what = {"stream": stream, "method": method, "seed": seed}
        row = what | run(stream, method, seed, options.root, options.validation)
        print(row, flush=True)
        rows = [other for other in rows if not what.items() <= other.items()] + [row]
        found.write_text(json.dumps(rows, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(rows, options.validation))


if __name__ == "__main__":
    main()
