"""Run the likelihood-ratio attack on three methods, after unlearning one task or 100 samples of it at the end.

    python -m experiments.likelihood_ratio --root DATA

Adds results to ``experiments/results/likelihood_ratio.json``, skips runs that it contains, and writes the table next to
it.
"""

import argparse
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch

from avalanche_amnesia.benchmarks.requests import without_requests
from experiments import comparison
from experiments.likelihood_ratio_attack import likelihood_ratio_audit
from experiments.methods import METHODS, make
from experiments.trials import Settings, best, measured, rows_of

OUTPUT = Path("experiments/results/likelihood_ratio.json")
SHOWN = ("DisjointSubnets", "AmnesiacHAT", "WSN")
SEEDS, TASK, SAMPLES = range(21, 29), 1, range(0, 6000, 60)
"""Positions of the samples in a request for samples: every 60th."""
BY_SAMPLES = ("DisjointSubnets",)
NOTES = f"""Task {TASK} of five, or {len(SAMPLES)} samples of it, is unlearned after the last task; eight seeds, 500
samples attacked (of samples' requests all), through the mask and head that the task had. AUC, and share of true
positives (TPR) at 1 % of false ones, against models that never saw the data, in another order; 95 % intervals over
seeds. *Null*: of models that never saw it either, in a third order. *Exact*: of models that never saw it, in the main
model's order, which its old head knows. *Matched*: of the unlearned models against the exact ones. *Above null*:
difference of the AUCs. *Before*: of models before the request. Settings are the best of the first six trials of
[comparison.md](comparison.md); trained without requests."""
SHOWN_VALUES = {
    "AUC": ("unlearned", "auc"),
    "TPR": ("unlearned", "tpr"),
    "null: AUC": ("retrained", "auc"),
    "above null": ("above_null", "auc"),
    "exact: AUC": ("exact", "auc"),
    "matched: AUC": ("matched", "auc"),
    "before: AUC": ("untouched", "auc"),
    "before: TPR": ("untouched", "tpr"),
}


def audited(stream, method, request, settings, root):
    setup = comparison.STREAMS[stream]
    benchmark = without_requests(setup.benchmark(root, SEEDS[0]))

    def strategy(seed, **kwargs):
        return make(method, setup, seed, benchmark, settings, **kwargs)

    samples = SAMPLES if request == "samples" else None
    found = likelihood_ratio_audit(strategy, benchmark, TASK, SEEDS, samples=samples)
    row = {name: asdict(attack) for name, attack in vars(found).items()}
    difference, interval = found.unlearned.above(found.retrained)
    return row | {"above_null": {"auc": difference, "auc_interval": interval}}


def table(rows):
    lines = ["# A likelihood-ratio attack", "", NOTES, ""]
    lines += [
        f"| {' | '.join(['stream', 'request', 'method', *SHOWN_VALUES])} |",
        "|---" * (3 + len(SHOWN_VALUES)) + "|",
    ]
    for row in (row for row in rows if "held_out" in row):  # rows without it are from an older, biased audit
        cells = [row["stream"], row["request"], row["method"]]
        for name, value in SHOWN_VALUES.values():
            low, high = row[name][f"{value}_interval"]
            cells.append(f"{row[name][value]:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="data root")
    parser.add_argument("--streams", nargs="+", choices=comparison.STREAMS, default=["permuted fashion"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(SHOWN))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for stream, method, request in product(options.streams, options.methods, ("task", "samples")):
        if request == "task" or method in BY_SAMPLES:
            what = {"stream": stream, "method": method, "request": request, "held_out": "pairs"}
            settings = Settings(**best(rows_of(comparison.OUTPUT), "settings", stream=stream, method=method))
            run = partial(audited, stream, method, request, settings, options.root)
            measured(options.output, what | {"settings": asdict(settings)}, run, table)


if __name__ == "__main__":
    main()
