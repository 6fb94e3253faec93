"""WSN on permuted MNIST as in its paper: 10 tasks of 60,000 images, MLP 784-100-100, batch 10, 5 epochs, no biases.

    python experiments/wsn_permuted_mnist.py --root DATA --density 0.5 --seed 0    # one run, one JSON file
    python experiments/wsn_permuted_mnist.py --table                                # table of all runs

The paper is Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev

import torch
from avalanche.training.plugins import LRSchedulerPlugin

from avalanche_amnesia.contrib.streams import PermutedMNIST
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP, SubnetModel
from avalanche_amnesia.training import WSN, ScoredWeights

PAPER = {0.1: 96.14, 0.3: 96.41}
"""Density (share of weights) → the paper's average accuracy in per cent; its figure for 0.5 was not available."""


@torch.no_grad()
def test(model, experiences):
    model.eval()
    return [100 * accuracy(model(e.tensors[0], e.task_label), e.tensors[1]) for e in experiences]


def run(options):
    benchmark = PermutedMNIST(options.tasks, root=options.root, n_train=options.n_train, seed=options.seed)
    torch.manual_seed(options.seed)
    model = SubnetModel(MLP(784, hidden=(100,), features=100), density=options.density)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=options.decay)
    strategy = WSN(
        model=model,
        optimizer=optimizer,
        masks=ScoredWeights(scores=options.scores, fit_head=False),
        train_mb_size=10,
        train_epochs=options.epochs,
        plugins=[LRSchedulerPlugin(schedule, reset_scheduler=True, reset_lr=True)],
        seed=options.seed,
    )
    matrix, bits, seconds = [], [], []
    for experience in benchmark.train_stream:
        began = time.perf_counter()
        strategy.train(experience)
        seconds.append(time.perf_counter() - began)
        matrix.append(test(model, benchmark.test_stream[: experience.task_label + 1]))
        bits.append(model.mask_bits())
        print(f"after task {experience.task_label}: mean {mean(matrix[-1]):.2f} %, {bits[-1]:.3f} bit", flush=True)
    learned = [row[-1] for row in matrix]
    return {
        "settings": {name: value for name, value in vars(options).items() if name not in ("root", "out", "table")},
        "accuracy": mean(matrix[-1]),
        "largest_forgetting": max(then - now for then, now in zip(learned, matrix[-1], strict=True)),
        "accuracy_matrix": matrix,
        "mask_bits": bits,
        "share_of_weights_in_use": float(model.cumulative_mask().float().mean()),
        "training_seconds": seconds,
    }


def mask_bits(runs):
    """Return the mask bits after 5 and 10 tasks as text; leave out a number that any of the runs lacks."""
    bits = [run.get("mask_bits", []) for run in runs]
    return ", ".join(f"{mean(run[n - 1] for run in bits):.3f}" for n in (5, 10) if min(map(len, bits)) >= n)


def table(folder):
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("wsn_permuted_mnist_*.json"))]
    head = "| c | seeds | accuracy % | paper % | forgetting | bit per weight and task: 5 tasks, 10 tasks |"
    lines = [head, "|" + "---|" * 6]
    for density in sorted({run["settings"]["density"] for run in runs}):
        same = [run for run in runs if run["settings"]["density"] == density]
        values = [run["accuracy"] for run in same]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        forgetting = max(run["largest_forgetting"] for run in same)
        seeds = ", ".join(str(run["settings"]["seed"]) for run in same)
        lines.append(
            f"| {density} | {seeds} | {mean(values):.2f}{spread} | {PAPER.get(density, '')} | {forgetting:.2f} | "
            f"{mask_bits(same)} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--density", type=float, default=0.5, help="c, share of weights of a task (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--n-train", type=int, default=None, help="training images per task (all)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of Adam, for weights and scores (%(default)s)")
    parser.add_argument("--decay", type=float, default=1.0, help="of the learning rate, per epoch (%(default)s)")
    parser.add_argument("--scores", choices=["keep", "redraw"], default="keep")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--table", action="store_true", help="make the table of the runs in --out, and run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.table:
        (options.out / "wsn_permuted_mnist.md").write_text(table(options.out))
        print((options.out / "wsn_permuted_mnist.md").read_text())
        return
    torch.set_num_threads(1)
    result = run(options)
    path = options.out / f"wsn_permuted_mnist_c{options.density}_seed{options.seed}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"average accuracy {result['accuracy']:.2f} %: {path}")


if __name__ == "__main__":
    main()
