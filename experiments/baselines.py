"""Search of the settings of stock strategies on every stream of the comparison: as many trials for each method.

    python -m experiments.baselines --root DATA --seeds 101
    python -m experiments.baselines --root DATA --streams "split cifar" --n-train 10000

Test images are never read: a sixth of the training images stands in for them. Adds to ``results/baselines.json`` and
writes the table beside it; trials that are there are not run again.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from avalanche_amnesia.lab.study.building import MEMORY, STOCK
from experiments.stock import TRIALS, make_stock, ranking
from experiments.streams import STREAMS, accuracy_on
from experiments.trials import search

RATES = (("Adam", 3e-4), ("Adam", 1e-3), ("SGD", 3e-2), ("SGD", 1e-1))
# Option that says how strongly a method holds on to earlier tasks, its middle value, and the factor to its neighbours.
STRENGTHS = {"EWC": ("ewc_lambda", 100.0, 10.0), "LwF": ("alpha", 1.0, 3.0), "DER++": ("label_weight", 0.5, 2.0)}
FIXED = {"LwF": {"temperature": 2.0}}
BETWEEN = 1.8
"""Factor between learning rates, for methods without a strength."""
NOTES = f"""# Settings of the stock strategies, searched on every stream

```bash
python -m experiments.baselines --root DATA
```

Naive, EWC, LwF and Replay are Avalanche's; DER++ is Naive with `DarkReplayPlugin`. All obey the stream's requests
(`TrajectoryPlugin`, `UnlearningPlugin`), and have the network, epochs and mini-batches of `experiments/streams.py`, and
norms of each task's own. DER++ keeps {MEMORY} samples of each task; Replay {MEMORY} times the stream's tasks in all, in
equal parts of those that it has. Every method has six trials, all of which are here: two learning rates of Adam and two
of SGD without momentum, at a middle strength of the method; then the best of these with a weaker and a stronger hold
(Naive and Replay: a lower and a higher rate).

*Accuracy*: mean over the tasks that remain at the end, on a sixth of the training images, which no training sees; test
images are never read. Chosen is the best mean over the seeds. *Images*: training images, where not all of them were
used (stratified).
"""


def trial(stream, method, settings, seed, n_train, root):
    setup = STREAMS[stream] if n_train is None else replace(STREAMS[stream], n_train=n_train)
    benchmark = setup.benchmark(root, seed, validation=True)
    started = time.process_time()
    strategy = make_stock(method, stream, seed, settings)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    left = [held_out for held_out in benchmark.test_stream if held_out.task_label not in setup.requested]
    remaining = mean(accuracy_on(strategy.model, held_out) for held_out in left)
    return {"remaining": remaining, "seconds": round(time.process_time() - started, 1)}


def table(rows):
    lines = [NOTES, "| stream | " + " | ".join(STOCK) + " |", "|---" * (len(STOCK) + 1) + "|"]
    streams = [stream for stream in STREAMS if any(row["stream"] == stream for row in rows)]
    found = {
        (stream, method): ranking([row for row in rows if (row["stream"], row["method"]) == (stream, method)])
        for stream, method in product(streams, STOCK)
    }
    for stream in streams:
        best = [next(iter(found[stream, method]), None) for method in STOCK]
        cells = ["–" if entry is None else f"{entry[0]}: {100 * entry[1]:.1f}" for entry in best]
        lines.append(f"| {stream} | {' | '.join(cells)} |")
    missing = [stream for stream in STREAMS if stream not in streams]
    lines += ["", f"Not searched yet: {', '.join(missing)}."] if missing else []
    for stream in streams:
        lines += ["", f"## {stream[0].upper() + stream[1:]}", "", "| method | settings | accuracy | seeds | images |"]
        lines += ["|---" * 5 + "|"]
        for method in STOCK:
            for settings, accuracy, mine in found[stream, method]:
                seeds = ", ".join(str(row["seed"]) for row in mine)
                images = ", ".join(sorted({"all" if row["n_train"] is None else f"{row['n_train']:,}" for row in mine}))
                lines.append(f"| {method} | {settings} | {100 * accuracy:.1f} | {seeds} | {images} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", choices=STOCK, default=list(STOCK))
    parser.add_argument("--seeds", nargs="+", type=int, default=[101])
    parser.add_argument(
        "--n-train", type=int, default=None, help="training images, stratified; by default the stream's"
    )
    parser.add_argument(
        "--output", type=Path, default=TRIALS, help="JSON of all trials; the table is written beside it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.output.read_text()) if options.output.exists() else []

    def measure(stream, method, settings):
        accuracies = []
        for seed in options.seeds:
            what = {"stream": stream, "method": method, "seed": seed, "n_train": options.n_train} | asdict(settings)
            row = next((row for row in rows if what.items() <= row.items()), None)
            if row is None:
                row = what | trial(stream, method, settings, seed, options.n_train, options.root)
                print(row, flush=True)
                rows.append(row)
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
                options.output.with_suffix(".md").write_text(table(rows))
            accuracies.append(row["remaining"])
        return mean(accuracies)

    for stream, method in product(options.streams, options.methods):
        search(RATES, STRENGTHS.get(method), BETWEEN, partial(measure, stream, method), FIXED.get(method))


if __name__ == "__main__":
    main()
