"""Compare strategies on one stream with unlearning requests, over several seeds: an ordinary Avalanche script.

    python experiments/compare.py --benchmark split_digits --methods hat amnesiac_hat ewc --seeds 0 1 2
    python experiments/compare.py --benchmark rotated_digits --methods hat subtract amnesiac_hat
    python experiments/compare.py --benchmark permuted_mnist --root DATA --n-train 3000 --requests '{"1": [0]}'

HAT and AdaHAT are controls: they learn the same stream but ignore all requests. All other methods unlearn: AmnesiacHAT,
WSN, PALL, CLPU-DER++ and Independent by themselves; Naive, EWC, LwF, Replay and DER++ by two plugins. ``--controls``
runs each method twice more: without unlearning, and deleting only heads (and masks). Copy the parts that you need.
"""

import argparse
import csv
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_SILENT", "true")

import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import EWC, LwF, Naive, Replay
from torch import nn
from torch.optim import SGD, Adam

from avalanche_amnesia import benchmarks
from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.contrib import streams
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin
from avalanche_amnesia.evaluation import (
    References,
    accuracy_difference_metrics,
    capacity_metrics,
    jsd_metrics,
    unlearned_accuracy_metrics,
)
from avalanche_amnesia.evaluation.resolution import distance_in_words, two_digits
from avalanche_amnesia.logging import WandBLogger
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AdaHAT, AmnesiacHAT, ScoredWeights
from avalanche_amnesia.training.host.lookup import find_plugin, remaining_experiences
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

STREAMS = {
    "split_digits": benchmarks.SplitDigits,
    "permuted_digits": benchmarks.PermutedDigits,
    "split_mnist": streams.SplitMNIST,
    "permuted_mnist": streams.PermutedMNIST,
    "rotated_digits": streams.RotatedDigits,
    "rotated_mnist": streams.RotatedMNIST,
    "split_fashion_mnist": streams.SplitFashionMNIST,
}
OWN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "hat": (HAT, MaskedModel, {}),
    "adahat": (AdaHAT, MaskedModel, {}),
    "amnesiac_hat": (AmnesiacHAT, MaskedModel, {}),
    "amnesiac_adahat": (AmnesiacHAT, MaskedModel, {"adjustment": "adahat"}),
    "subtract": (AmnesiacHAT, MaskedModel, {"compensation": "none"}),
    "hat_cl": (AmnesiacHAT, MaskedModel, {"unlearning": lambda: UnlearningPlugin(deletion="exclusive")}),
    "wsn": (WSN, SubnetModel, {"masks": ScoredWeights(score_lr=1e-2)}),
    "pall": (PALL, SubnetModel, {"score_lr": 1e-2}),
    "clpu_derpp": (CLPUDERpp, SideNetworks, {}),
    "independent": (Independent, NetworkPerTask, {}),
}
STOCK = {
    "naive": (Naive, {}),
    "ewc": (EWC, {"ewc_lambda": 1e4}),
    "lwf": (LwF, {"alpha": 1.0, "temperature": 2.0}),
    "replay": (Replay, {"mem_size": 250}),
    "derpp": (Naive, {}),  # with DarkReplayPlugin, because Avalanche's DER does not support multi-head models
}
CONTROLS = {"": True, "+nothing": False, "+head": "head"}
MEASURES = {
    "accuracy": "mean test accuracy of the remaining tasks",
    "jsd_own": "bits to the retrained reference, own mask",
    "jsd_floor": "the same between two references (data order)",
    "jsd_ratio": "jsd_own / jsd_floor",
    "unlearned": "accuracy on unlearned tasks through the head and mask they had",
    "reference": "what the same heads read from the retrained reference",
    "ad": "accuracy difference to the model that never unlearned",
    "control": "what that model gains with its heads fitted anew, and nothing unlearned",
    "capacity": "network capacity",
}
METRICS = {
    "jsd_own": "JSD_own",
    "jsd_floor": "JSD_own_floor_order",
    "jsd_ratio": "JSD_own_ratio_order",
    "unlearned": "UnlearnedAccuracy",
    "reference": "UnlearnedAccuracy_reference",
    "ad": "AccuracyDifference",
    "control": "AccuracyDifference_control",
}


def make_benchmark(options, seed):
    settings = {"n_tasks": options.tasks, "seed": seed, "n_train": options.n_train, "n_test": options.n_test}
    if "mnist" in options.benchmark:
        settings |= {"root": options.root, "download": options.download}
    stream = STREAMS[options.benchmark](**settings)
    return with_unlearning(stream, options.requests, permanent=options.permanent, deadline=options.deadline)


def make_strategy(method, options, seed, in_features, **kwargs):
    torch.manual_seed(seed)  # the references need the same initial bits at every call
    backbone = MLP(in_features, hidden=(256, 100), features=64)
    common = {"train_mb_size": options.batch, "train_epochs": options.epochs, "eval_mb_size": 512} | kwargs
    method, _, control = method.partition("+")
    if method in OWN:
        strategy, wrap, settings = OWN[method]
        model = wrap(backbone)
        if strategy in (HAT, AdaHAT):  # the ledger records requests, but nothing is unlearned
            common["plugins"] = [TrajectoryPlugin(), UnlearningPlugin(obey=False)]
        own = {name: value() if callable(value) else value for name, value in settings.items()}
        made = strategy(model=model, optimizer=Adam(model.parameters(), lr=options.lr), seed=seed, **own, **common)
    else:
        strategy, settings = STOCK[method]
        model = MultiHeadModel(backbone)
        plugins = [SeedingPlugin(seed), InMemoryLoaderPlugin(), TrajectoryPlugin(), UnlearningPlugin()]
        plugins += [DarkReplayPlugin(seed=seed)] if method == "derpp" else []
        optimizer = SGD(model.parameters(), lr=options.lr_stock)
        made = strategy(
            model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), plugins=plugins, **settings, **common
        )
    if control:
        find_plugin(made, UnlearningPlugin).obey = CONTROLS[f"+{control}"]
    return made


def run(method, options, seed):
    benchmark = make_benchmark(options, seed)
    in_features = benchmark.train_stream[0].dataset[0][0].numel()

    def make(**kwargs):
        return make_strategy(method, options, seed, in_features, **kwargs)

    references = References(make, benchmark)
    name = f"{method}-{seed}"
    with WandBLogger(name=name, group=method, dir=str(options.out), config=vars(options) | {"seed": seed}) as logger:
        evaluator = EvaluationPlugin(
            accuracy_metrics(experience=True),
            jsd_metrics(references, probes=["own"]),
            unlearned_accuracy_metrics(benchmark, references),
            accuracy_difference_metrics(references),
            capacity_metrics(),
            loggers=[logger],
        )
        strategy = make(evaluator=evaluator)
        for experience in benchmark.train_stream:
            strategy.train(experience)
            left = remaining_experiences(strategy, benchmark.test_stream)
            results = strategy.eval(left)
    accuracies = [
        results[f"Top1_Acc_Exp/eval_phase/test_stream/Task{e.task_label:03d}/Exp{e.current_experience:03d}"]
        for e in left
    ]
    measured = {
        "accuracy": statistics.mean(accuracies) if accuracies else None,
        **{measure: results.get(f"{metric}/eval_phase/test_stream") for measure, metric in METRICS.items()},
        "capacity": results.get("Capacity"),
    }
    print(f"{name}: " + ", ".join(f"{k} {v:.4f}" for k, v in measured.items() if v is not None), flush=True)
    return {"method": method, "seed": seed} | measured


def summary(rows, method, measure):
    values = [row[measure] for row in rows if row["method"] == method and row[measure] is not None]
    if not values:
        return "–"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    if measure.startswith("jsd"):
        return f"{distance_in_words(statistics.mean(values))} ± {two_digits(deviation)}"
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--benchmark", choices=STREAMS, default="split_digits")
    parser.add_argument("--root", default=None, help="data root of the MNIST family (or the variable AMNESIA_DATA)")
    parser.add_argument("--download", action="store_true", help="let torchvision download what is missing")
    parser.add_argument("--methods", nargs="+", choices=[*OWN, *STOCK], default=[*OWN, *STOCK])
    parser.add_argument("--controls", action="store_true", help="each method also doing nothing, and dropping heads")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--n-train", type=int, default=None, help="subsample, stratified")
    parser.add_argument("--n-test", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's, for the masked methods")
    parser.add_argument("--lr-stock", type=float, default=0.05, help="SGD's, under which EWC and LwF do best")
    parser.add_argument("--permanent", nargs="*", type=int, default=[])
    parser.add_argument("--deadline", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument(
        "--requests",
        type=lambda text: {int(after): tasks for after, tasks in json.loads(text).items()},
        default={1: [0], 3: [1], 4: [4]},
        help='JSON, after which task: which tasks to unlearn, e.g. \'{"1": [0], "3": [1], "4": [4]}\'',
    )
    options = parser.parse_args()
    if options.controls:
        options.methods = [method + control for method in options.methods for control in CONTROLS]
    return options


def main():
    options = parse()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [run(method, options, seed) for method in options.methods for seed in options.seeds]
    with open(options.out / "per_seed.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"\n{options.benchmark}, requests {options.requests}, {len(options.seeds)} seeds, mean ± standard deviation")
    print(f"{'method':21}" + "".join(f"{measure:>18}" for measure in MEASURES))
    for method in options.methods:
        print(f"{method:21}" + "".join(f"{summary(rows, method, measure):>18}" for measure in MEASURES))
    for measure, meaning in MEASURES.items():
        print(f"  {measure}: {meaning}")
    print(f"\nper seed: {options.out / 'per_seed.csv'}; W&B runs: {options.out / 'wandb'} (a group per method)")


if __name__ == "__main__":
    main()
