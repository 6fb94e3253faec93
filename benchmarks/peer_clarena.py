"""Measure training steps of CLArena's HAT and AdaHAT, relative to plain steps; needs an environment with CLArena.

    PYTHON -m benchmarks.peer_clarena TASKS.pt ROUNDS

``TASKS.pt`` contains two tasks' inputs ``(samples, inputs)`` and labels from 0, layer widths, batch size, epochs of the
first task, and learning rate. CLArena's classes are called without Lightning's loop, which would add time. Prints
ratios as JSON.
"""

import json
import sys
import time
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from clarena.backbones import HATMaskMLP
from clarena.cl_algorithms import HAT, AdaHAT
from clarena.heads import HeadsTIL
from torch import Tensor, nn

N_CLASSES = 10


class Masks(dict[int, Any]):
    """Dict of masks by task number that also accepts numbers as strings, because CLArena's AdaHAT uses both."""

    def __missing__(self, key: str) -> Any:
        return self[int(key)]


def driven(kind: type) -> type:
    """Return a subclass of a CLArena method whose training steps need no Lightning trainer."""

    class Driven(kind):
        trainer = SimpleNamespace(num_training_batches=0)

        def optimizers(self) -> torch.optim.Optimizer:
            found: torch.optim.Optimizer = self.optimizer
            return found

        def manual_backward(self, loss: Tensor) -> None:
            loss.backward()

    return Driven


def made(kind: type, tasks: dict[str, Any], **options: Any) -> Any:
    """Return a new CLArena method of class ``kind``, with a network of the layer widths ``tasks["widths"]``."""
    inputs, *hidden, features = tasks["widths"]
    backbone = HATMaskMLP(input_dim=inputs, hidden_dims=hidden, output_dim=features, gate="sigmoid")
    backbone.masks = Masks()
    settings = {"s_max": 400, "clamp_threshold": 50, "mask_sparsity_reg_factor": 0.75}
    return driven(kind)(backbone, HeadsTIL(input_dim=features), **settings | options)


def ratios(method: Any, tasks: dict[str, Any], rounds: int) -> list[float]:
    """Train both tasks; return CPU time ÷ CPU time of a plain step, for each step of the second task's last epochs."""
    inputs, *hidden, features = tasks["widths"]
    widths = [inputs, *hidden, features]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    plain = nn.Sequential(*layers, nn.Linear(features, N_CLASSES))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=tasks["lr"])
    criterion, found = nn.CrossEntropyLoss(), []
    for task, (x, y) in enumerate(tasks["data"], start=1):
        method.setup_task_id(task, N_CLASSES, partial(torch.optim.SGD, lr=tasks["lr"]), None)
        method.optimizer = method.configure_optimizers()["optimizer"]
        method.on_train_start()
        epochs = tasks["epochs"] if task == 1 else 1 + rounds
        for epoch in range(epochs):
            parts = torch.randperm(len(x)).split(tasks["batch"])
            method.trainer.num_training_batches = len(parts)
            for number, index in enumerate(parts):
                inputs, labels = x[index], y[index]
                began = time.process_time()
                plain_optimizer.zero_grad()
                criterion(plain(inputs), labels).backward()
                plain_optimizer.step()
                between = time.process_time()
                method.training_step((inputs, labels), number)
                ended = time.process_time()
                if task == 2 and epoch > 0:
                    found.append((ended - between) / (between - began))
        method.on_train_end()
    return found


def main(file: str, rounds: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tasks = torch.load(file)
    methods = {
        "CLArena, HAT": made(HAT, tasks, adjustment_mode="hat"),
        "CLArena, AdaHAT": made(AdaHAT, tasks, adjustment_mode="adahat", adjustment_intensity=1e-6),
    }
    print(json.dumps({name: ratios(method, tasks, int(rounds)) for name, method in methods.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
