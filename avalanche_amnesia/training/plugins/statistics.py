"""Running statistics of a task's norms, taken again when its training is over."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn

from avalanche_amnesia.training.plugins.seeding import preserved_rng


@torch.no_grad()
def retake_statistics(strategy: Any, task: int, n_batches: int) -> None:
    """Take the running statistics of a task's norms from its training data, as its final weights and mask see it.

    What training leaves behind lags behind the weights where it was short, and mixes the soft masks of every scale
    with hard ones. Here each statistic is the plain average over mini-batches, through the binary mask, with dropout
    off. The strategy's loader gives the batches; the global random streams stay as they were. Of a batch that holds
    samples of other tasks too (replay), the task's own are used; fewer than two have no variance and are passed over.

    Args:
        strategy: at the end of the task's training.
        task: its label.
        n_batches: mini-batches to read, at most; 0: nothing changes.
    """
    model = strategy.model
    parts = model.task_parts(task)
    norms = [] if parts is None else [m for m in parts.modules() if getattr(m, "running_mean", None) is not None]
    if not norms or n_batches == 0:
        return
    was, momenta = model.training, [norm.momentum for norm in norms]
    handles = [norm.register_forward_pre_hook(_plain_average()) for norm in norms]
    model.eval()
    for norm in norms:
        norm.training = True
    try:
        with preserved_rng():
            for batch in islice(strategy.dataloader, n_batches):
                x = batch[0][batch[-1] == task].to(strategy.device)
                if len(x) > 1:
                    model.features(x, task)
    finally:
        for norm, momentum, handle in zip(norms, momenta, handles, strict=True):
            norm.momentum = momentum
            handle.remove()
        model.train(was)


def _plain_average() -> Callable[[nn.Module, Any], None]:
    """A hook that weighs the n-th call of a norm with 1/n; the first replaces what was there."""
    calls = 0

    def weigh(norm: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        norm.momentum = 1 / calls

    return weigh
