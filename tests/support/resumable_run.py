"""A run that saves its strategy after every task, goes on from the one saved last, and can kill itself."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from avalanche_amnesia import SplitDigits, TrajectoryPlugin, UnlearningRequest, with_unlearning
from avalanche_amnesia.saving.files import unsealed
from avalanche_amnesia.trajectory import log_files
from support.strategies import amnesiac
from support.strategy_state import bits, frozen, trajectory, unlearning_plugin

REQUESTS = [
    UnlearningRequest(tasks=(0,), at=1),
    UnlearningRequest(tasks=(1,), at=3, when="iteration", iteration=4),
    UnlearningRequest(tasks=(2, 4), at=4),
]


def keep(strategy: Any, folder: Path) -> None:
    torch.save(strategy, folder / "strategy.part")
    os.replace(folder / "strategy.part", folder / "strategy.pt")


def run(folder: Path, kill_at: int = 0, saved_first: bool = True) -> None:
    """Train the rest of the stream; write hashes of the final state into ``result.json``.

    Args:
        folder: for the saved strategy and the logs.
        kill_at: number of the operation on files at which it is killed, before it if odd, else after it.
        saved_first: whether it saves its strategy before the first task too.
    """
    torch.set_num_threads(1)
    operations = count_operations(kill_at)
    logs = folder / "logs"
    if (folder / "strategy.pt").exists():
        strategy = torch.load(folder / "strategy.pt", weights_only=False)
    else:
        strategy = amnesiac(train_mb_size=20, train_epochs=2, trajectory=TrajectoryPlugin(path=logs))
        if saved_first:
            keep(strategy, folder)
    stream = with_unlearning(SplitDigits(n_train=400, n_test=200), REQUESTS).train_stream
    for experience in stream[len(unlearning_plugin(strategy).trained) :]:
        strategy.train(experience)
        keep(strategy, folder)
    result = {
        "model": bits(strategy.model),
        "logs": hashlib.sha256(repr(frozen(dict(trajectory(strategy).logs))).encode()).hexdigest(),
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in logs.glob("task_*")},
        "index": {**unsealed((logs / "index.json").read_text()), "trajectory": None},
        "operations": operations[0],
    }
    (folder / "result.json").write_text(json.dumps(result))


def count_operations(kill_at: int) -> list[int]:
    """Count operations on the files of the logs, and kill the process at one of them."""
    done = [0]
    for owner, name in ((log_files, "save_file"), (os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir")):
        original = getattr(owner, name)

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            done[0] += 1
            if done[0] == kill_at and kill_at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if done[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, counted)
    return done
