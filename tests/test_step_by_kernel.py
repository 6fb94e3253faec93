"""Adam by its kernel alone steps as torch's optimizer does, to the bit."""

import copy

import pytest
import torch
from torch import nn

from avalanche_amnesia.optimizers import BareAdam


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "eps": 1e-4, "betas": (0.5, 0.9)}, {"maximize": True}])
@torch.no_grad()
def test_its_steps_are_those_of_the_optimizer(settings):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    step = BareAdam(torch.optim.Adam([mine], fused=True, **settings))
    optimizer = torch.optim.Adam([other], fused=True, **settings)
    for number in range(20):
        if number == 10:
            step = copy.deepcopy(step)
        mine = step.optimizer.param_groups[0]["params"][0]
        gradient = None if number in (0, 5) else torch.randn(1000, generator=generator)
        for one, parameter in ((step.optimizer, mine), (optimizer, other)):
            one.param_groups[0]["lr"] = 0.01 / (1 + number)
            parameter.grad = gradient
        step()
        optimizer.step()
        assert torch.equal(mine, other)
    kept, expected = step.optimizer.state[mine], optimizer.state[other]
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    assert not torch.equal(other, start)
