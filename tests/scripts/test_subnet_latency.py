"""The measurement of subnets' latency."""

import torch

from benchmarks.subnet_latency import TASK, Network, masked_model, measure, ratio


def test_a_line_has_shares_and_ratios():
    line = measure("mlp", batch=2, share=0.1, rounds=3, calls=2, memory_format=torch.contiguous_format)
    name, batch, parameters, flops, of_masked, *_ = line.split()
    assert (name, batch) == ("mlp", "2")
    assert 0 < float(parameters) < 0.2
    assert 0 < float(flops) < 0.2
    assert float(of_masked) > 0


def test_the_mask_opens_the_share_that_was_asked_for():
    model = masked_model(
        Network(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4000), torch.nn.Linear(4000, 2)), (4,), "1"), 0.3
    )
    assert abs(model.binary_mask(TASK).float().mean() - 0.3) < 0.03


def test_ratios_are_taken_within_rounds():
    assert ratio([1.0, 20.0, 300.0], [2.0, 40.0, 600.0]) == "0.50 (0.50 to 0.50)"
