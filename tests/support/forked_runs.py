"""Runs through one store in forked processes, some of them killed; prints what they led to.

A program of its own: a process that has run a backward pass before it forks can't run another one in its child.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.runs import RunStore
from support.strategies import DIGITS, amnesiac

KILLS = 6


def forked(folder: Path) -> tuple[int, Any]:
    """A run in a process of its own: its number, and the end of a pipe on which it answers."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, os.fdopen(reader)
    run = RunStore(folder).run(amnesiac(train_epochs=2))
    os.write(writer, b"begun\n")
    for experience in DIGITS.train_stream[:3]:
        run.train(experience)
    record = run.unlearn([1])
    run.train(DIGITS.train_stream[3])
    model = state_hashes(run.strategy.model.state_dict())
    os.write(writer, json.dumps({"computed": run.computed, "model": model, "after": record.after}).encode())
    os._exit(0)


def answer(process: int, pipe: Any) -> dict[str, Any]:
    """What a run led to."""
    text = pipe.read()
    os.waitpid(process, 0)
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def main(folder: Path) -> None:
    """Run once undisturbed, twice beside each other, and through kills at any moment."""
    torch.set_num_threads(1)
    amnesiac()  # reads the network, which each process would have to do otherwise
    started = time.perf_counter()
    result: dict[str, Any] = {"whole": answer(*forked(folder / "whole"))}
    seconds = time.perf_counter() - started
    both = [forked(folder / "both") for _ in range(2)]
    result["beside each other"] = [answer(*one) for one in both]
    chance = random.Random(0)
    result["ends"], kills = [], 0
    while kills < KILLS:  # through kills to its end, and then another life in a new directory
        process, pipe = forked(folder / str(len(result["ends"])))
        if pipe.readline() == "begun\n":
            time.sleep(chance.uniform(0, seconds / 2))
        os.kill(process, signal.SIGKILL)
        text = pipe.read()
        kills += not text
        os.waitpid(process, 0)
        if text:  # it had come to its end
            result["ends"].append(json.loads(text))
    result["ends"].append(answer(*forked(folder / str(len(result["ends"])))))
    result["kills"] = kills
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
