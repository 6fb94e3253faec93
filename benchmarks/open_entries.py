"""Measure the time of layers that compute only open units and inputs, relative to the same layers with all of them.

    python -m benchmarks.open_entries [--rounds N]

Forward and backward passes on one thread, for several shares of open units and inputs; medians over rounds that run
both variants, one after the other. These times determine the bounds in :mod:`avalanche_amnesia.unit_graph.masking` and
:mod:`avalanche_amnesia.unit_graph.graph`: the largest share of open entries, and the smallest number of saved products,
for which leaving out entries saves time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from avalanche_amnesia.unit_graph import masking
from avalanche_amnesia.unit_graph.graph import OpenEntries
from avalanche_amnesia.unit_graph.masking import LayerMasks, run_open_units

LAYERS = {
    "linear 100-64, 64 samples": ((64, 100), (64, 100)),
    "linear 256-256, 64 samples": ((256, 256), (64, 256)),
    "linear 784-256, 64 samples": ((256, 784), (64, 784)),
    "linear 2000-2000, 64 samples": ((2000, 2000), (64, 2000)),
    "conv 64-64 3×3, 16 images 32×32": ((64, 64, 3, 3), (16, 64, 32, 32)),
    "conv 256-256 3×3, 16 images 8×8": ((256, 256, 3, 3), (16, 256, 8, 8)),
}
"""Layer → shapes of its weight and its input."""
SHARES = (0.3, 0.5, 0.7, 0.8)
"""Shares of open units and of open inputs."""


def seconds(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    """Return the CPU seconds of a forward and a backward pass of ``run``."""
    x.grad = weight.grad = None
    began = time.process_time()
    run(x, weight).sum().backward()
    return time.process_time() - began


def ratio(layer: str, share: float, rounds: int) -> tuple[float, float]:
    """Return two numbers: time with open entries only ÷ time with all entries, and number of saved products."""
    of_weight, of_input = LAYERS[layer]
    torch.manual_seed(0)
    weight, x = torch.randn(of_weight, requires_grad=True), torch.randn(of_input, requires_grad=True)
    rows, columns = (torch.randperm(n)[: round(share * n)].sort().values for n in of_weight[:2])
    masks = LayerMasks({}, {"w": OpenEntries(rows, columns, 1 - share**2)})
    linear = len(of_weight) == 2
    options = () if linear else (1, 1)
    over_all = F.linear if linear else torch.conv2d
    found = []
    with mock.patch.object(masking, "WORTH_IT", 0):
        for _ in range(rounds):
            whole = seconds(lambda x, w: over_all(x, w, None, *options), x, weight)
            found.append(seconds(lambda x, w: run_open_units(masks, "w", x, w, None, *options), x, weight) / whole)
    return median(found), (1 - share**2) * weight.numel() * (x.numel() // of_input[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| layer | open share | time over open entries / over all | million products saved |\n|---|---|---|---|")
    for layer in LAYERS:
        for share in SHARES:
            time_, saved = ratio(layer, share, rounds)
            print(f"| {layer} | {share:.1f} × {share:.1f} | {time_:.2f} | {saved / 1e6:.1f} |")


if __name__ == "__main__":
    main()
