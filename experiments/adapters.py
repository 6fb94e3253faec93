"""Adapters on a frozen network: pretrained on five classes of CIFAR-10, then five tasks of the other five classes.

    python -m experiments.adapters --root DATA --validation 101      # held-out training images: every learning rate
    python -m experiments.adapters --root DATA --test 21             # test images: each method's best learning rate

Adds results to ``experiments/results/adapters.json``, skips runs that it contains, and writes the table next to it.
"""

import time
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import nn
from torch.optim import Adam

from avalanche_amnesia import DisjointModel, DisjointSubnets, with_unlearning
from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.benchmarks.data import Chain
from avalanche_amnesia.contrib.baselines import Independent, NetworkPerTask
from avalanche_amnesia.contrib.streams import SmallConvNet
from avalanche_amnesia.isolation import Pools
from experiments.streams import STREAMS, accuracy_on, held_out
from experiments.trials import FitHead, arguments, rows_tested, run_trials

KNOWN, TASKS = range(5), [[5, 6], [6, 7], [7, 8], [8, 9], [9, 5]]
REQUESTS = {3: [1], 4: [2]}
RANKS, PER_CLASS = 20, 1000
RATES = (1e-3, 3e-3, 1e-2)
OUTPUT = Path("experiments/results/adapters.json")


def residual():
    """Return a small residual network for images of 32 × 32 pixels; features ``(batch, 256)``."""
    channels = (32, 64, 128, 256)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=0, channels=channels, stem_width=16, stem_type="deep")
    network.maxpool = nn.Identity()  # images of 32 × 32 pixels are too small for it
    network.features = channels[-1]
    return network


NETWORKS = {"convolutional": SmallConvNet, "residual": residual}


class LowRank(nn.Module):
    """Sum of an unchanged convolution and a trainable low-rank convolution, which is initially zero."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = nn.Conv2d(layer.in_channels, RANKS, 3, layer.stride, 1, bias=False)
        self.up = nn.Conv2d(RANKS, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def images_of(root, validation):
    images = STREAMS["split cifar"].images(root)
    images = held_out(images) if validation else images
    return images.train, images.test, Chain((*images.before, *images.after))


@cache
def pretrained(name, seed, root, validation):
    """Return a network trained on the classes in ``KNOWN``, which no task has; cached, so all methods share it."""
    (x, y), _, prepare = images_of(root, validation)
    rows = (y < len(KNOWN)).nonzero()[:, 0]
    torch.manual_seed(seed)
    network = NETWORKS[name]()
    head = nn.Linear(network.features, len(KNOWN))
    optimizer = Adam([*network.parameters(), *head.parameters()], lr=1e-3)
    for index in (part for _ in range(4) for part in rows[torch.randperm(len(rows))][:10_000].split(64)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(network(prepare(x[index].float()))), y[index]).backward()
        optimizer.step()
    return network.eval()


def adapted(network, seed):
    torch.manual_seed(seed)
    network = deepcopy(network).requires_grad_(False)
    wide = [name for name, layer in network.named_modules() if getattr(layer, "kernel_size", None) == (3, 3)]
    for name in wide:
        network.set_submodule(name, LowRank(network.get_submodule(name)))
    return network


METHODS = {
    "heads alone": lambda net, seed: (DisjointSubnets, DisjointModel(deepcopy(net).requires_grad_(False))),
    "weight pools over adapters": lambda net, seed: (DisjointSubnets, DisjointModel(adapted(net, seed))),
    "a copy of the network per task": lambda net, seed: (Independent, NetworkPerTask(deepcopy(net))),
}


def own_bytes(model, task):
    """Return the bytes of the tensors that belong only to ``task``: its head, and its weights or its whole network."""
    return sum(t.nbytes for t in model.heads[task].state_dict().values())


def run(network, method, seed, rate, root, validation):
    (x, y), (tx, ty), prepare = images_of(root, validation)
    network = pretrained(network, seed, root, validation)
    rows = torch.cat([(y == label).nonzero()[:PER_CLASS, 0] for label in range(10)])
    data = (x[rows], y[rows]), (tx, ty)
    benchmark = with_unlearning(task_benchmark(*data, TASKS, transforms=[prepare] * len(TASKS)), REQUESTS)
    kind, model = METHODS[method](network, seed)
    options = {"plugins": [FitHead(seed)]} if kind is Independent else {"isolation": Pools(len(TASKS))}
    optimizer = Adam(model.parameters(), lr=rate)
    strategy = kind(model=model, optimizer=optimizer, train_mb_size=64, train_epochs=4, seed=seed, **options)
    began = time.process_time()
    learned = []
    for trained, tested in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        strategy.train(trained)
        learned.append(accuracy_on(model, tested))
    records = next(plugin.records for plugin in strategy.plugins if hasattr(plugin, "records"))
    return {
        "accuracy": mean(learned),
        "bytes": own_bytes(model, 0),
        "milliseconds": 1e3 * mean(record.seconds for record in records),
        "exact": all(record.claim == "exact" for record in records),
        "seconds": round(time.process_time() - began, 1),
    }


def table(rows):
    lines = ["# Adapters on a network of five classes", "", NOTES, ""]
    lines += ["| network | method | accuracy | exact | bytes of a task | ms per request | rate |", "|---" * 7 + "|"]
    for network, method in product(NETWORKS, METHODS):
        mine = rows_tested(rows, network=network, method=method)
        if mine:
            cells = [f"{100 * mean(row['accuracy'] for row in mine):.1f}", "yes" if mine[0]["exact"] else "no"]
            cells += [
                f"{mine[0]['bytes']:,}",
                f"{mean(row['milliseconds'] for row in mine):.1f}",
                f"{mine[0]['rate']:g}",
            ]
            lines.append(f"| {network} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


NOTES = """CIFAR-10 (copies from JPEG of quality 75), a network trained on 10,000 images of classes 0-4, then five tasks
of two of the other classes each, 1,000 images a class, 4 epochs; tasks 1 and 2 are unlearned. Accuracy (per cent) of
each task when it had been trained, on test images, seed 21; Adam at the best of .001, .003 and .01 for each method on
held out training images of seed 101. All heads are fitted. Requests with all hashes; those of the residual network were
timed beside other work."""


def main():
    parser = arguments(__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    places = [{"network": network, "method": method} for network, method in product(options.networks, options.methods)]
    run_trials(OUTPUT, options, places, RATES, run, table)


if __name__ == "__main__":
    main()
