"""Measure the cost of logging to W&B (offline) and to JSON lines: time of 50 short runs, and of 10,000 steps.

python -m benchmarks.logging_cost --runs 50 --steps 10000 [--pictures]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("WANDB_SILENT", "true")

import torch
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from torch.optim import Adam

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.contrib.metrics import capacity_pictures_metrics
from avalanche_amnesia.evaluation import capacity_metrics
from avalanche_amnesia.lab.logging import JSONLogger
from avalanche_amnesia.logging import WandBLogger
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT

KINDS = ("none", "JSON lines", "W&B offline")


def logger_of(kind, folder):
    if kind == "none":
        return BaseLogger()
    return JSONLogger(folder) if kind == "JSON lines" else WandBLogger(dir=folder, mode="offline")


def run(stream, logger, metrics, epochs, batch):
    torch.manual_seed(0)
    model = MaskedModel(MLP(64, hidden=(32,), features=32))
    evaluator = EvaluationPlugin(*metrics, loggers=[logger])
    strategy = AmnesiacHAT(
        model=model, optimizer=Adam(model.parameters()), train_mb_size=batch, train_epochs=epochs, evaluator=evaluator
    )
    for experience in stream.train_stream[:2]:
        strategy.train(experience)
        strategy.eval(stream.test_stream)
    if hasattr(logger, "finish"):
        logger.finish()
    return strategy.clock.train_iterations


def short_runs(stream, kind, n, folder, images):
    begun = time.perf_counter()
    for i in range(n):
        pictures = capacity_pictures_metrics() if images else []
        metrics = accuracy_metrics(experience=True), loss_metrics(epoch=True), capacity_metrics(), *pictures
        run(stream, logger_of(kind, folder / str(i)), metrics, epochs=1, batch=64)
    return time.perf_counter() - begun


def long_run(stream, kind, steps, folder, minibatch):
    per_epoch = sum(-(-len(e.dataset) // 16) for e in stream.train_stream[:2])
    begun = time.perf_counter()
    metrics = (loss_metrics(minibatch=minibatch, epoch=True),)
    done = run(stream, logger_of(kind, folder), metrics, epochs=max(1, steps // per_epoch), batch=16)
    return (time.perf_counter() - begun) / done


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pictures", action="store_true", help="of masks and capacity, in the short runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stream = SplitDigits(n_train=400, n_test=200)
    with tempfile.TemporaryDirectory() as made:
        out = Path(made)
        run(stream, BaseLogger(), (), 1, 64)  # warm-up
        for kind in KINDS:
            took = short_runs(stream, kind, options.runs, out / kind, options.pictures)
            print(f"{options.runs} short runs, {kind}, pictures {options.pictures}: {took:.1f} s", flush=True)
        for kind in KINDS:
            for minibatch in (False, True):
                took = long_run(stream, kind, options.steps, out / f"long {kind} {minibatch}", minibatch)
                print(f"{options.steps} steps, {kind}, loss of each step {minibatch}: {took * 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
