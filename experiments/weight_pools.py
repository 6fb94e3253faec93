"""Weight pools beside other methods, each at the best of the same learning rates, with fitted heads for all.

    python -m experiments.weight_pools --root DATA --validation 101          # held out training images: every rate
    python -m experiments.weight_pools --root DATA --test 21 22 23           # test images: each method's best rate

Adds to ``experiments/results/weight_pools.json`` and writes the table beside it; what is there is not run again.
"""

import time
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import mean, stdev

import torch
from torch.optim import Adam

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.models import DisjointModel, MaskedModel, SubnetModel
from avalanche_amnesia.training import WSN, AmnesiacHAT, DisjointSubnets, ScoredWeights
from experiments import streams
from experiments.streams import PERMUTED_FASHION, accuracy_on
from experiments.trials import FitHead, arguments, run_trials, test_rows

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
    plugins = [FitHead(seed)] if method in FIT_HERE else []
    return kind(model=model, optimizer=optimizer, seed=seed, plugins=plugins, **settings.training, **options)


def run(stream, method, seed, rate, root, validation):
    settings = STREAMS[stream]
    benchmark = settings.benchmark(root, seed, validation)
    if method == "CLPU-DER++":
        stays = [e.task_label for e in benchmark.train_stream if e.task_label not in settings.requested]
        benchmark = with_unlearning(benchmark, permanent=stays)
    began = time.process_time()
    strategy = make(method, stream, seed, benchmark, rate)
    strategy.train(benchmark.train_stream)
    left = [tested for tested in benchmark.test_stream if tested.task_label not in settings.requested]
    return {
        "accuracy": mean(map(partial(accuracy_on, strategy.model), left)),
        "megabytes": sum(value.nbytes for value in strategy.model.state_dict().values()) / 2**20,
        "seconds": round(time.process_time() - began, 1),
    }


def table(rows):
    shown = [stream for stream in STREAMS if test_rows(rows, stream=stream)]

    def lines(title, cell):
        yield from ("", f"## {title}", "", f"| method | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|")
        for method in METHODS:
            of_streams = [test_rows(rows, stream=stream, method=method) for stream in shown]
            if any(of_streams):
                cells = [cell(mine) if mine else "–" for mine in of_streams]
                yield f"| {method}{', exact' if method in EXACT else ''} | {' | '.join(cells)} |"

    def accuracy(mine):
        values = [100 * row["accuracy"] for row in mine]
        return f"{mean(values):.1f}" + (f"±{stdev(values):.1f}" if len(values) > 1 else "")

    parts = [lines("Tasks that remain, at the end", accuracy), lines("Rates", lambda mine: f"× {mine[0]['rate']}")]
    return "\n".join(["# Weight pools beside other methods", "", NOTES, *chain.from_iterable(parts)]) + "\n"


NOTES = """Mean accuracy (per cent) on the test images of the tasks that remain after all requests, ± standard deviation
over seeds; one seed where none stands. Rates: times the stream's learning rate of Adam, the best of × 1, 2, 4 and 8 for
this method on held out training images of seed 101. Streams, networks and epochs: `experiments/streams.py`. All heads
are fitted when their task ends. *Independent, narrow*: a network for each task, all that stand at one time together as
large as the one of the others."""


def main():
    parser = arguments(__doc__)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    places = [{"stream": stream, "method": method} for stream, method in product(options.streams, options.methods)]
    run_trials(OUTPUT, options, places, RATES, run, table)


if __name__ == "__main__":
    main()
