"""A run through a store in a process of its own, with logs in files and a W&B run."""

import json
import os
from pathlib import Path

import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin

from avalanche_amnesia import TrajectoryPlugin, WandBLogger, capacity_metrics
from avalanche_amnesia.lab.runs import RunStore
from support.strategies import DIGITS, amnesiac, learn
from support.strategy_state import bits


def run(folder: Path, out: Path) -> None:
    """Train three tasks, unlearn one, train another.

    Args:
        folder: of the store.
        out: where ``begun`` is written when it begins, and ``result.json`` when it ends.
    """
    torch.set_num_threads(1)
    logger = WandBLogger(dir=folder.with_name("wandb"), mode="offline")
    evaluator = EvaluationPlugin(accuracy_metrics(epoch=True), capacity_metrics(), loggers=[logger])
    trajectory = TrajectoryPlugin(path=folder.with_name(f"logs-{os.getpid()}"))
    through = RunStore(folder).run(amnesiac(train_epochs=2, evaluator=evaluator, trajectory=trajectory))
    (out / "begun").touch()
    learn(through, DIGITS.train_stream[:3])
    record = through.unlearn([1])
    through.train(DIGITS.train_stream[3])
    through.strategy.eval(DIGITS.test_stream)
    logger.finish()
    model = bits(through.strategy.model)
    result = {"computed": through.computed, "model": model, "after": record.after}
    (out / "result.json").write_text(json.dumps(result))
