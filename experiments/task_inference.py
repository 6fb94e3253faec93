"""Compare accuracy without and with task labels, for both rules of task inference, after all unlearning requests.

    python -m experiments.task_inference --root DATA --validation 101 --test 21

Settings are those of ``experiments/results/comparison.json``. Writes ``experiments/results/task_inference.md``.
"""

from pathlib import Path
from statistics import mean

import torch

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models.task_inference import TaskInference
from experiments.comparison import OUTPUT, STREAMS
from experiments.methods import make
from experiments.streams import accuracy_on
from experiments.trials import Settings, arguments, best, rows_of

SHOWN = ("rotated", "permuted fashion", "permuted 20", "split cifar")
METHODS = ("DisjointSubnets", "AmnesiacHAT")


def shares(model, left, rule):
    """Return two fractions of samples, as means over tasks: with the correct task, and with correct task and class."""
    inferred, right = [], []
    for tested in left:
        x, y = task_data(tested)
        parts = [TaskInference(model, rule)(part) for part in x.split(500)]
        known = torch.cat([part.tasks for part in parts]) == tested.task_label
        inferred.append(float(known.float().mean()))
        right.append(float((known & (torch.cat([part.classes for part in parts]) == y)).float().mean()))
    return mean(inferred), mean(right)


def row(stream, method, seed, root, validation):
    settings = STREAMS[stream]
    benchmark = settings.benchmark(root, seed, validation)
    chosen = Settings(**best(rows_of(OUTPUT), "settings", stream=stream, method=method))
    strategy = make(method, settings, seed, benchmark, chosen)
    strategy.train(benchmark.train_stream)
    left = [tested for tested in benchmark.test_stream if tested.task_label not in settings.requested]
    cells = [stream, method, "held out" if validation else "test", str(len(left)), f"{1 / len(left):.2f}"]
    cells.append(f"{mean(accuracy_on(strategy.model, tested) for tested in left):.3f}")
    for rule in ("entropy", "confidence"):
        cells += [f"{share:.3f}" for share in shares(strategy.model, left, rule)]
    return f"| {' | '.join(cells)} |"


NOTES = """Of the tasks that remain after all requests: accuracy with the task label, then for each rule the share of
samples whose task is inferred, and of those whose class is right too. *Guess*: one of so many tasks. Held out training
images of seed 101, by which the default rule was chosen, and test images of seed 21."""


def main():
    parser = arguments(__doc__)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(SHOWN))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# Predictions without task labels", "", NOTES, ""]
    lines.append(
        "| stream | method | images | tasks | guess | with label | entropy: task | class | confidence: task | class |"
    )
    lines.append("|---" * 10 + "|")
    seeds = [(seed, True) for seed in options.validation] + [(seed, False) for seed in options.test]
    for seed, validation in seeds:
        for stream in options.streams:
            lines += [row(stream, method, seed, options.root, validation) for method in METHODS]
            print(lines[-2], lines[-1], sep="\n", flush=True)
    Path("experiments/results/task_inference.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
