"""Measure CLArena for comparison, in a separate Python environment, on the same data and network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.measuring import Figure
from benchmarks.networks import N_CLASSES, Network, digit_tasks

CLARENA = "clarena==1.1.0"
WIDTHS = {"mlp": (784, 256, 256), "wide": (784, 2000, 2000), "mlp3": (784, 256, 100, 64)}
"""Networks that CLArena can build: name in :data:`~benchmarks.networks.NETWORKS` → layer widths."""
ROOT = Path(__file__).parents[1]


class PeerMissingError(RuntimeError):
    """Error: CLArena can't be installed, run, or build the network."""


def clarena_python() -> Path:
    """Return the path of Python in an environment with CLArena; create the environment if it does not exist.

    Raises:
        PeerMissingError: CLArena can't be installed.
    """
    folder = ROOT / "build" / "clarena"
    python = folder / "bin" / "python"
    for command in (["venv", "--quiet", "--clear", str(folder)], ["pip", "install", "--python", str(python), CLARENA]):
        if not (folder / ".ready").exists():
            done = subprocess.run([sys.executable, "-m", "uv", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerMissingError(f"{CLARENA} can't be installed: {done.stderr.strip().splitlines()[-1:]}")
    (folder / ".ready").touch()
    return python


def time_clarena(name: str, network: Network, batch: int, steps: int, rounds: int) -> dict[str, Figure]:
    """Measure steps of CLArena's HAT and AdaHAT with SGD, relative to plain steps; return method → median, quartiles.

    Raises:
        PeerMissingError: CLArena can't build the network, or can't be installed or run.
    """
    if name not in WIDTHS:
        raise PeerMissingError(f"CLArena's masked networks have no {name}")
    python, file = clarena_python(), ROOT / "build" / "clarena" / "tasks.pt"
    x, y = digit_tasks(network.input_shape, batch * steps)
    data = [(x[y // N_CLASSES == task], y[y // N_CLASSES == task] % N_CLASSES) for task in (0, 1)]
    torch.save({"data": data, "widths": WIDTHS[name], "batch": batch, "epochs": network.epochs, "lr": 0.05}, file)
    command = [str(python), "-W", "ignore", "-m", "benchmarks.peer_clarena", str(file), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerMissingError(f"CLArena did not run: {done.stderr.strip().splitlines()[-1:]}")
    return {method: Figure.of(ratios) for method, ratios in json.loads(done.stdout.splitlines()[-1]).items()}
