"""A run through a store in a process of its own; says when it begins, and what it led to. Argument: the directory."""

import json
import sys
from pathlib import Path

import torch

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.runs import RunStore
from support.strategies import DIGITS, amnesiac


def main(folder: Path) -> None:
    """Train three tasks, unlearn one, train another."""
    torch.set_num_threads(1)
    run = RunStore(folder).run(amnesiac(train_epochs=2))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for experience in DIGITS.train_stream[:3]:
        run.train(experience)
    record = run.unlearn([1])
    run.train(DIGITS.train_stream[3])
    model = state_hashes(run.strategy.model.state_dict())
    sys.stdout.write(json.dumps({"computed": run.computed, "model": model, "after": record.after}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
