"""Run the authors' AmnesiacHAT (CLArena) with the images, sample orders and initial weights of our experiment.

    python -m experiments.published_differences --root DATA --seeds 1 --export TASKS     # writes TASKS/seed1.pt
    PYTHON -m experiments.clarena_run TASKS/seed1.pt --output seed1.json     # PYTHON of a separate environment

The second command imports nothing from this package. It needs torch and CLArena at commit 3b4fb656 of its repository
(https://github.com/pengxiang-wang/continual-learning-arena). Release 1.1.0 on PyPI does not contain the method: its
``cl_algorithms/amnesiac_hat.py`` is not valid Python. The stored results are from the classes of that commit, copied
into the release. This script calls the classes like the authors' pipeline, without Lightning's loop. The model that
unlearns nothing is also the authors': ``disable_unlearning=True``.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clarena.backbones.amnesiac_hat_mlp import AmnesiacHATMLP
from clarena.cl_algorithms.amnesiac_hat import AmnesiacHAT
from clarena.cul_algorithms.amnesiac_hat_unlearn import AmnesiacHATUnlearn
from clarena.heads import HeadsTIL
from torch import Tensor
from torch.optim import Adam

from benchmarks.peer_clarena import N_CLASSES, Masks, driven

OF_TRAINING = ("memory", "logits", "labels", "alpha")
"""Options that affect the model that unlearns nothing."""


def made(data: dict[str, Any], options: argparse.Namespace, *, unlearns: bool) -> Any:
    """Return the authors' method, untrained, with the initial backbone weights in ``data``."""
    torch.manual_seed(data["seed"])
    inputs, *hidden, features = data["widths"]
    backbone = AmnesiacHATMLP(inputs, hidden, features, "sigmoid", disable_unlearning=not unlearns)
    backbone.masks = Masks()
    for layer, (weight, bias) in zip(backbone.fc, data["initial"], strict=True):
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
    return driven(AmnesiacHAT)(  # as in their pipeline, the repair continues with the state of the task's optimizer
        backbone,
        HeadsTIL(input_dim=features),
        buffer_size=options.memory,
        distillation_reg_factor=options.logits,
        replay_ce_factor=options.labels,
        adjustment_mode="adahat",
        adjustment_intensity=options.alpha,
        s_max=400,
        clamp_threshold=50,
        mask_sparsity_reg_factor=0.75,
        disable_unlearning=not unlearns,
    )


def batches(data: dict[str, Any], task: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the mini-batches of one epoch of ``task`` (counted from 0), in the order stored in ``data``."""
    pixels = data["pixels"][task]
    for index in data["orders"][task][epoch].long().split(data["batch_size"]):
        yield data["x"][index][:, pixels], data["y"][index]


def trained(data: dict[str, Any], options: argparse.Namespace, *, unlearns: bool) -> Any:
    """Return the authors' method after training all tasks and, if ``unlearns``, processing all unlearning requests."""
    model = made(data, options, unlearns=unlearns)
    unlearner = AmnesiacHATUnlearn(
        model,
        if_backup_compensation=options.backups,
        compensate_order="normal",
        if_replay_repairing=options.repair_steps > 0 and options.memory > 0,
        repair_batch_size=data["batch_size"],
        repair_num_steps=options.repair_steps,
        repair_strategy="joint",
    )
    requests = {after + 1: [task + 1 for task in tasks] for after, tasks in data["requests"].items()}
    gone: set[int] = set()
    for task in range(1, len(data["orders"]) + 1):  # CLArena counts tasks from 1
        if unlearns:
            unlearnable = [t for t in range(1, task + 1) if t not in gone]
            unlearner.setup_task_id(task, requests, unlearnable, [])
        model.setup_task_id(task, N_CLASSES, partial(Adam, lr=data["lr"]), None)
        model.optimizer = model.configure_optimizers()["optimizer"]
        model.on_train_start()
        for epoch in range(len(data["orders"][task - 1])):
            model.trainer.num_training_batches = -(-len(data["y"]) // data["batch_size"])
            for number, batch in enumerate(batches(data, task - 1, epoch)):
                model.training_step(batch, number)
        model.on_train_end()
        if unlearns and task in requests:
            unlearner.unlearn()
            gone |= {*requests[task]}
            model.unlearned_task_ids = gone
    return model


@torch.no_grad()
def accuracies(model: Any, data: dict[str, Any], tasks: list[int]) -> list[float]:
    """Return the test accuracy of each task in ``tasks`` (counted from 0), with the task's binary mask and head."""
    model.eval()
    result = []
    for task in tasks:
        logits = model.forward(data["test_x"][:, data["pixels"][task]], stage="test", task_id=task + 1)[0]
        result.append(float((logits.argmax(1) == data["test_y"]).float().mean()))
    return result


def _same(row: dict[str, Any], data: dict[str, Any], settings: dict[str, Any], names: Iterable[str]) -> bool:
    return row["images"] == len(data["y"]) and all(row["settings"][name] == settings[name] for name in names)


def main() -> None:
    """Run the tasks of one file with and without unlearning, and add the results to the output file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", type=Path, help="file of experiments.published_differences --export")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--memory", type=int, default=500, help="samples in the replay memory; 0: no replay, no repair")
    parser.add_argument("--logits", type=float, default=0.5, help="weight of the logits in memory")
    parser.add_argument("--labels", type=float, default=0.5, help="weight of the labels in memory")
    parser.add_argument("--alpha", type=float, default=1e-6, help="AdaHAT's intensity")
    parser.add_argument("--repair-steps", type=int, default=50)
    parser.add_argument("--backups", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.load(options.tasks)
    remaining = [t for t in range(len(data["orders"])) if t not in {u for us in data["requests"].values() for u in us}]
    settings = {name: value for name, value in vars(options).items() if name not in ("tasks", "output")}
    rows = json.loads(options.output.read_text()) if options.output.exists() else []
    alike = [row["full"] for row in rows if _same(row, data, settings, OF_TRAINING)]
    started = time.process_time()
    model = trained(data, options, unlearns=True)
    unlearned = accuracies(model, data, remaining)
    full = alike[0] if alike else accuracies(trained(data, options, unlearns=False), data, remaining)
    row = {
        "seed": data["seed"],
        "images": len(data["y"]),
        "settings": settings,
        "remaining": unlearned,
        "full": full,
        "ad": sum(a - b for a, b in zip(unlearned, full, strict=True)) / len(full),
        "open": {
            str(t): [round(float(m.mean()), 3) for m in masks.values()] for t, masks in model.backbone.masks.items()
        },
        "seconds": round(time.process_time() - started, 1),
    }
    rows = [other for other in rows if not _same(other, data, settings, settings)] + [row]
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(row, flush=True)


if __name__ == "__main__":
    main()
