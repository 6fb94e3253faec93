"""A fused Adam by its kernel alone steps as torch's optimizer does, to the bit; any other is left to torch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from avalanche_amnesia.optimizers import BareStep, step_by_kernel


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "eps": 1e-4, "betas": (0.5, 0.9)}, {"maximize": True}])
@pytest.mark.parametrize("kind", [Adam, AdamW])
@torch.no_grad()
def test_its_steps_are_those_of_the_optimizer(kind, settings):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (1000, 3, 40)]

    def made():
        mine = [nn.Parameter(part.clone()) for part in start]
        return kind([{"params": mine[:2]}, {"params": mine[2:], "lr": 0.1}], fused=True, **settings)

    step, optimizer, by_kernel = BareStep(made()), made(), []
    for number in range(20):
        if number == 10:
            step = copy.deepcopy(step)
        for place in range(3):
            lacks = number == 0 or (number + place) % 7 == 0
            gradient = None if lacks else torch.randn(start[place].shape, generator=generator)
            for one in (step.optimizer, optimizer):
                one.param_groups[0]["lr"] = 0.01 / (1 + number)
                parameters_of(one)[place].grad = gradient
        if number % 3:
            step()
        else:
            by_kernel.append(step_by_kernel(step.optimizer))
            if not by_kernel[-1]:
                step.optimizer.step()
        optimizer.step()
        assert all(map(torch.equal, parameters_of(step.optimizer), parameters_of(optimizer)))
    assert not by_kernel[0]
    assert by_kernel[-1]
    for mine, other in zip(parameters_of(step.optimizer), parameters_of(optimizer), strict=True):
        kept, expected = step.optimizer.state[mine], optimizer.state[other]
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[name], expected[name]) for name in kept)


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Doubled(Adam):
    """An Adam that steps twice."""

    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: Adam(p, fused=False),
        lambda p: Adam(p, fused=True, amsgrad=True),
        lambda p: Adam(p, fused=True, lr=torch.tensor(0.1)),
        lambda p: Doubled(p, fused=True),
    ],
)
def test_what_else_torch_would_do_is_left_to_it(make):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = parameter.detach().clone()
    assert not step_by_kernel(optimizer)
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("around", ["hook", "function", "scheduler"])
def test_whatever_is_done_around_a_step_is_done(around):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Adam([parameter], fused=True)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert step_by_kernel(optimizer)
    if around == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    elif around == "function":
        optimizer.step = lambda: None
    else:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it counts steps
    assert not step_by_kernel(optimizer)


def test_a_step_that_was_replaced_for_the_whole_class_is_taken(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], fused=True)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert step_by_kernel(optimizer)
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, closure=None: None)
    assert not step_by_kernel(optimizer)
