"""RanPAC without a network, over random features of the pixels, on the streams of the method comparison.

    python -m experiments.random_features --root DATA --test 21 22 23

Adds to ``experiments/results/random_features.json`` and writes the table beside it; what is there is not run again.
Nothing is chosen: the ridge comes from the sums.
"""

import time
from pathlib import Path
from statistics import mean

import torch

from avalanche_amnesia import AnalyticModel, RanPAC, UnlearningPlugin
from avalanche_amnesia.training.host.lookup import find_plugin
from experiments.comparison import OUTPUT as COMPARISON
from experiments.comparison import STREAMS, with_better_heads
from experiments.streams import accuracy_on
from experiments.trials import arguments, measured, rows_of, rows_tested, spread

OUTPUT, WIDTH = Path("experiments/results/random_features.json"), 2000
BESIDE = ("DisjointSubnets", "Independent", "AmnesiacHAT")


def run(stream, seed, root):
    benchmark = STREAMS[stream].benchmark(root, seed)
    inputs = benchmark.train_stream[0].dataset[0][0].numel()
    model = AnalyticModel(None, inputs, projection=WIDTH, batch=64, seed=seed)
    strategy = RanPAC(model=model, train_mb_size=1024, seed=seed)
    began = time.process_time()
    strategy.train(benchmark.train_stream)
    seconds = round(time.process_time() - began, 1)
    left = [e for e in benchmark.test_stream if e.task_label not in STREAMS[stream].requested]
    records = find_plugin(strategy, UnlearningPlugin).records
    return {
        "accuracy": mean(accuracy_on(model, experience) for experience in left),
        "seconds": seconds,
        "bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "claims": [record.claim for record in records],
        "milliseconds": 1e3 * mean(record.seconds for record in records),
    }


def table(rows):
    beside = rows_of(COMPARISON)
    lines = ["# RanPAC without a network", "", NOTES, ""]
    lines += [f"| stream | RanPAC, exact | {' | '.join(BESIDE)} | MB | CPU s | ms a request |", "|---" * 7 + "|"]
    for stream in STREAMS:
        mine = rows_tested(rows, stream=stream)
        if mine:
            cells = [spread([100 * row["accuracy"] for row in mine])]
            cells += [
                spread([100 * row["accuracy"] for row in with_better_heads(beside, stream=stream, method=method)])
                for method in BESIDE
            ]
            cells.append(f"{mine[0]['bytes'] / 1e6:.0f}")
            cells += [f"{mean(row['seconds'] for row in mine):.0f}", f"{mean(row['milliseconds'] for row in mine):.0f}"]
            lines.append(f"| {stream} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


NOTES = f"""{WIDTH:,} random ReLU features of the pixels, drawn from the seed, and a ridge regression for each task:
streams, requests, seeds 21 to 23 and test images of the [comparison](comparison.md), whose methods stand beside it with
the heads that were better on held out images. Accuracy (%) of the tasks that remain. RanPAC has no setting to choose;
its ridge comes from its sums. *MB*: the whole model; *ms*: a request for a task, with all hashes."""


def main():
    parser = arguments(__doc__)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for stream in options.streams:
        for seed in options.test:
            what = {"stream": stream, "seed": seed, "validation": False}
            measured(OUTPUT, what, lambda stream=stream, seed=seed: run(stream, seed, options.root), table)


if __name__ == "__main__":
    main()
