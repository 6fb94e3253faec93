"""Weight pools beside other methods, each at the best of the same learning rates, with fitted heads for all.

    python -m experiments.weight_pools --root DATA --validation 101          # held out training images: every rate
    python -m experiments.weight_pools --root DATA --test 21 22 23           # test images: each method's best rate

Adds to ``experiments/results/weight_pools.json`` and writes the table beside it; what is there is not run again.
"""

import argparse
import json
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from torch.optim import Adam

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import DisjointModel, MaskedModel, SubnetModel
from avalanche_amnesia.training import WSN, AmnesiacHAT, DisjointSubnets, ScoredWeights
from avalanche_amnesia.training.head_fit import fit_trained_head
from experiments import streams
from experiments.streams import PERMUTED_FASHION, accuracy_on

STREAMS = streams.STREAMS | {"permuted fashion": PERMUTED_FASHION}
RATES = (1, 2, 4, 8)
"""Times the stream's learning rate."""
METHODS = {
    "DisjointSubnets": (DisjointSubnets, DisjointModel, {"isolation": "planned"}),
    "AmnesiacHAT": (AmnesiacHAT, MaskedModel, {}),
    "AmnesiacHAT, pools": (AmnesiacHAT, MaskedModel, {"isolation": "planned"}),
    "WSN": (WSN, SubnetModel, {"masks": ScoredWeights(score_lr=1e-2, fit_head=True)}),
    "PALL": (PALL, SubnetModel, {"score_lr": 1e-2}),
    "CLPU-DER++": (CLPUDERpp, SideNetworks, {}),
    "Independent": (Independent, NetworkPerTask, {}),
    "Independent, narrow": (Independent, NetworkPerTask, {}),
}
EXACT = ("DisjointSubnets", "AmnesiacHAT, pools", "CLPU-DER++", "Independent", "Independent, narrow")
FIT_HERE = ("PALL", "CLPU-DER++", "Independent", "Independent, narrow")
"""Methods that fit no head by themselves."""
OUTPUT = Path("experiments/results/weight_pools.json")


def make(method, stream, seed, benchmark, rate):
    """A fresh strategy."""
    settings = STREAMS[stream]
    kind, wrap, options = METHODS[method]
    planned = Pools.planned(benchmark)
    if options.get("isolation") == "planned":
        options = options | {"isolation": planned}
    torch.manual_seed(seed)
    network = settings.narrow(1 + max(planned.slots.values())) if method.endswith("narrow") else settings.network()
    model = wrap(network)
    optimizer = Adam(model.parameters(), lr=rate * settings.lr)
    return kind(model=model, optimizer=optimizer, seed=seed, eval_mb_size=512, **settings.training, **options)


def run(stream, method, seed, rate, root, validation):
    settings = STREAMS[stream]
    benchmark = settings.benchmark(root, seed, validation)
    if method == "CLPU-DER++":
        stays = [e.task_label for e in benchmark.train_stream if e.task_label not in settings.requested]
        benchmark = with_unlearning(benchmark, permanent=stays)
    began = time.process_time()
    strategy = make(method, stream, seed, benchmark, rate)
    for trained in benchmark.train_stream:
        strategy.train(trained)
        if method in FIT_HERE and trained.task_label in strategy.model.tasks:
            strategy.experience = trained
            fit_trained_head(strategy, trained.task_label, seed)
    left = [tested for tested in benchmark.test_stream if tested.task_label not in settings.requested]
    return {
        "accuracy": mean(map(partial(accuracy_on, strategy.model), left)),
        "megabytes": sum(value.nbytes for value in strategy.model.state_dict().values()) / 2**20,
        "seconds": round(time.process_time() - began, 1),
    }


def best_rate(rows, stream, method):
    """The rate with the best mean on held out training images; None where none was tried."""
    tried = [row for row in rows if row["validation"] and (row["stream"], row["method"]) == (stream, method)]
    by_rate = {rate: [row["accuracy"] for row in tried if row["rate"] == rate] for rate in RATES}
    return max((rate for rate in RATES if by_rate[rate]), key=lambda rate: mean(by_rate[rate]), default=None)


def table(rows):
    shown = [stream for stream in STREAMS if any(row["stream"] == stream and not row["validation"] for row in rows)]
    lines = ["# Weight pools beside other methods", "", NOTES, "", "## Tasks that remain, at the end", ""]
    lines += ["| method | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for method in METHODS:
        if not any(row["method"] == method and not row["validation"] for row in rows):
            continue
        cells = []
        for stream in shown:
            mine = [r for r in rows if not r["validation"] and (r["stream"], r["method"]) == (stream, method)]
            values = [100 * row["accuracy"] for row in mine]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.1f}{spread} (× {mine[0]['rate']})" if values else "–")
        lines.append(f"| {method}{', exact' if method in EXACT else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


NOTES = """Mean accuracy (per cent) on the test images of the tasks that remain after all requests, ± standard deviation
over seeds; one seed where none stands. In brackets the rate: times the stream's learning rate of Adam, the best of × 1,
2, 4 and 8 for this method on held out training images of seed 101. Streams, networks and epochs:
`experiments/streams.py`. All heads are fitted when their task ends. *Independent, narrow*: a network for each task,
all that stand at one time together as large as the one of the others."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--validation", nargs="*", type=int, default=[], help="seeds on held out training images")
    parser.add_argument("--test", nargs="*", type=int, default=[], help="seeds on the test images")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def rows():
        return json.loads(OUTPUT.read_text()) if OUTPUT.exists() else []

    cells = [(seed, True, rate) for seed in options.validation for rate in RATES]
    cells += [(seed, False, None) for seed in options.test]
    for stream, method, (seed, validation, rate) in product(options.streams, options.methods, cells):
        chosen = best_rate(rows(), stream, method) if rate is None else rate
        what = {"stream": stream, "method": method, "seed": seed, "rate": chosen, "validation": validation}
        if chosen is None or any(what.items() <= row.items() for row in rows()):
            continue
        row = what | run(stream, method, seed, chosen, options.root, validation)
        print(row, flush=True)
        OUTPUT.write_text(json.dumps([*rows(), row], indent=1) + "\n")  # read again: others may add to it meanwhile
    OUTPUT.with_suffix(".md").write_text(table(rows()))


if __name__ == "__main__":
    main()
