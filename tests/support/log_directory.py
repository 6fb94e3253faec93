"""Trajectories in directories, and what both hold."""

from pathlib import Path

import torch

from avalanche_amnesia.trajectory import Trajectory
from support.strategy_state import frozen


def contents(store):
    """Everything that a trajectory knows, comparable."""
    logs = [(task, {name: dict(entry.parts) for name, entry in log.items()}) for task, log in store.logs.items()]
    return frozen(logs), store.report()


def files(path):
    return sorted(file.name for file in Path(path).iterdir())


def with_three_tasks(path, **options):
    generator = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(20, generator=generator)}
    store = Trajectory(path=path, **options)
    for task in range(3):
        after = {"w": state["w"] + torch.randn(20, generator=generator)}
        state = {**after, **store.record(task, state, after)}
    return store, state
