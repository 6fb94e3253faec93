"""A run through a store in a process of its own, with logs in files and a W&B run.

It says when it begins, and what it led to. Argument: the directory.
"""

import json
import os
import sys
from pathlib import Path

import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.evaluation import capacity_metrics
from avalanche_amnesia.logging import WandBLogger
from avalanche_amnesia.runs import RunStore
from avalanche_amnesia.training.plugins import TrajectoryPlugin
from support.strategies import DIGITS, amnesiac


def main(folder: Path) -> None:
    """Train three tasks, unlearn one, train another."""
    torch.set_num_threads(1)
    logger = WandBLogger(dir=folder.with_name("wandb"), mode="offline")
    evaluator = EvaluationPlugin(accuracy_metrics(epoch=True), capacity_metrics(images=False), loggers=[logger])
    trajectory = TrajectoryPlugin(path=folder.with_name(f"logs-{os.getpid()}"))
    run = RunStore(folder).run(amnesiac(train_epochs=2, evaluator=evaluator, trajectory=trajectory))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for experience in DIGITS.train_stream[:3]:
        run.train(experience)
    record = run.unlearn([1])
    run.train(DIGITS.train_stream[3])
    run.strategy.eval(DIGITS.test_stream)
    logger.finish()
    model = state_hashes(run.strategy.model.state_dict())
    sys.stdout.write(json.dumps({"computed": run.computed, "model": model, "after": record.after}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
