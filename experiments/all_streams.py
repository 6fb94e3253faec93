"""Every method on every stream of the comparison, with unlearning requests: what remains, and how well it is known.

    python -m experiments.all_streams --root DATA --seeds 11 12 13                  # on the test images
    python -m experiments.all_streams --root DATA --seeds 101 102 --validation      # on held out training images

Adds to ``experiments/results/all_streams.json`` (``…_validation.json``) and writes the table beside it. Settings of the
stock strategies are those of ``experiments/baselines.py``.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from torch.optim import Adam

from avalanche_amnesia.contrib.baselines import CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.lab.study.building import STOCK
from avalanche_amnesia.models import MaskedModel, SubnetModel
from avalanche_amnesia.training import EVEN_BUDGET, HAT, WSN, AdaHAT, AmnesiacHAT, HardAttention, ScoredWeights
from experiments.comparison import benchmark_of
from experiments.stock import make_stock
from experiments.streams import STREAMS, accuracy_on

PRICE = HardAttention(sparsity_weight=0.5, s_max=100.0, embedding_lr=0.02, fit_head=True)
OWN = {
    "AmnesiacHAT": (AmnesiacHAT, MaskedModel, {}),
    "AmnesiacHAT, pools": (AmnesiacHAT, MaskedModel, {"isolation": "planned"}),
    "HAT": (HAT, MaskedModel, {}),
    "AdaHAT": (AdaHAT, MaskedModel, {}),
    "WSN": (WSN, SubnetModel, {"masks": ScoredWeights(score_lr=1e-2)}),
    "CLPU-DER++": (CLPUDERpp, SideNetworks, {}),
    "Independent": (Independent, NetworkPerTask, {}),
}
ABLATIONS = {
    "AmnesiacHAT, λ .5": (AmnesiacHAT, MaskedModel, {"masks": PRICE}),
    "AmnesiacHAT, reuse 1": (AmnesiacHAT, MaskedModel, {"masks": replace(EVEN_BUDGET, reuse=1.0)}),
    "AmnesiacHAT, reuse 0": (AmnesiacHAT, MaskedModel, {"masks": replace(EVEN_BUDGET, reuse=0.0)}),
    "AmnesiacHAT, a pool per task": (AmnesiacHAT, MaskedModel, {"isolation": "pools"}),
    "WSN, scores in 2 bits": (WSN, SubnetModel, {"masks": ScoredWeights(score_lr=1e-2, score_bits=2)}),
    "WSN, scores in 1 bit": (WSN, SubnetModel, {"masks": ScoredWeights(score_lr=1e-2, score_bits=1)}),
}
METHODS = [*OWN, *STOCK]
COLUMNS = {
    "remaining": "mean accuracy of the tasks that remain, at the end (HAT, AdaHAT obey no request: of the same ones)",
    "learned": "mean accuracy of each task when it had just been trained, of those that were not requested at once",
    "first": "the same of the first task",
    "free": "share of the units that no remaining task uses at the end",
}
NOTES = """Streams, networks and requests: `experiments/streams.py`, the same network, epochs and mini-batches for every
method. Means ± standard deviations over the seeds, in per cent; without a deviation: one seed.

* HAT and AdaHAT learn masks at their published settings; AmnesiacHAT and its pools at this package's defaults, which
  were chosen on held out training images of seeds 101 and 102.
* Pools have the slots that the stream's requests allow (`Pools.planned`): their unlearning is exact to the bit, as it
  is with CLPU-DER++ and Independent.
* CLPU-DER++ is told in advance which tasks will never be requested: it trains these in one network.
* Naive, EWC, LwF, Replay and DER++ obey requests by `TrajectoryPlugin` and `UnlearningPlugin`, have the settings of
  [baselines.md](baselines.md), and norms of each task's own.
* Independent has a network for each task."""
OUTPUT = Path("experiments/results/all_streams")


def make(method, stream, seed, benchmark):
    """A fresh strategy."""
    if method in STOCK:
        return make_stock(method, stream, seed)
    settings = STREAMS[stream]
    kind, wrap, options = (OWN | ABLATIONS)[method]
    if options.get("isolation") == "planned":
        options = options | {"isolation": Pools.planned(benchmark)}
    torch.manual_seed(seed)
    model = wrap(settings.network())
    optimizer = Adam(model.parameters(), lr=settings.lr)
    return kind(model=model, optimizer=optimizer, seed=seed, eval_mb_size=512, **settings.training, **options)


def run(stream, method, seed, root, validation):
    settings = STREAMS[stream]
    benchmark = benchmark_of(method, stream, seed, root, validation)
    started = time.process_time()
    strategy = make(method, stream, seed, benchmark)
    test = partial(accuracy_on, strategy.model)
    learned = {}
    for trained, tested in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        strategy.train(trained)
        if tested.task_label in strategy.model.tasks:
            learned[tested.task_label] = test(tested)
    left = [tested for tested in benchmark.test_stream if tested.task_label not in settings.requested]
    masked = isinstance(strategy.model, MaskedModel)
    return {
        "remaining": mean(map(test, left)),
        "learned": mean(learned.values()),
        "first": learned[0],
        "free": 1 - float(strategy.model.cumulative_mask().float().mean()) if masked else None,
        "seconds": round(time.process_time() - started, 1),
    }


def cell(values):
    if not values or None in values:
        return "–"
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}"


def table(rows, validation):
    where = "held out training images" if validation else "test images"
    lines = [f"# Every method on every stream, on {where}", "", NOTES, "", "## Tasks that remain, at the end", ""]
    found = {}
    for row in rows:
        found.setdefault((row["stream"], row["method"]), []).append(row)
    streams = [stream for stream in STREAMS if any(there == stream for there, _ in found)]
    methods = [method for method in [*OWN, *STOCK, *ABLATIONS] if any(there == method for _, there in found)]
    lines += ["| method | " + " | ".join(streams) + " |", "|---" * (len(streams) + 1) + "|"]
    for method in methods:
        cells = [cell([row["remaining"] for row in found.get((stream, method), [])]) for stream in streams]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += ["", "Below, each stream by itself:", "", *(f"* *{name}*: {meaning}" for name, meaning in COLUMNS.items())]
    for stream in streams:
        lines += ["", f"## {stream[0].upper() + stream[1:]}", ""]
        lines += ["| method | seeds | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
        for method in methods:
            mine = sorted(found.get((stream, method), []), key=lambda row: row["seed"])
            if mine:
                cells = [cell([row[name] for row in mine]) for name in COLUMNS]
                lines.append(f"| {method} | {', '.join(str(row['seed']) for row in mine)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *ABLATIONS], default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13])
    parser.add_argument("--validation", action="store_true", help="on held out training images: to choose settings")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    output = options.output.with_name(options.output.name + "_validation") if options.validation else options.output
    found = output.with_suffix(".json")
    for seed, stream, method in product(options.seeds, options.streams, options.methods):
        what = {"stream": stream, "method": method, "seed": seed}
        row = what | run(stream, method, seed, options.root, options.validation)
        print(row, flush=True)
        rows = json.loads(found.read_text()) if found.exists() else []  # read again: others may add to it meanwhile
        rows = [other for other in rows if not what.items() <= other.items()] + [row]
        found.write_text(json.dumps(rows, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(rows, options.validation))


if __name__ == "__main__":
    main()
