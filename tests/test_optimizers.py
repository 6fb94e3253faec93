"""The optimizer follows added, replaced and removed parameters of the model, as Avalanche's function does."""

import copy
import random
from functools import partial

import pytest
import torch
from avalanche.models.dynamic_optimizers import update_optimizer
from torch import nn
from torch.optim import SGD, Adam, AdamW

from avalanche_amnesia.optimizers import BareStep, follow_model, step_by_kernel


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def content(optimizer, names):
    held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return held, {names[id(p)]: sorted(state) for p, state in optimizer.state.items()}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_pass_equals_the_update_of_avalanche(seed, fresh):
    draw = random.Random(seed)
    first = {f"backbone.{i}": nn.Parameter(torch.randn(2)) for i in range(3)}
    ours, theirs = (SGD(first.values(), lr=0.1, momentum=0.9) for _ in range(2))
    names = {id(p): name for name, p in first.items()}
    parameters, known, alive = first, first, list(first.values())
    for step in range(6):
        parameters = dict(parameters)
        for i in range(draw.randrange(3)):  # new heads
            parameters[f"heads.{step}.{i}"] = nn.Parameter(torch.randn(2))
        for name in draw.sample(sorted(parameters), 2):  # one grew, one was removed
            if draw.random() < 0.5:
                parameters[name] = nn.Parameter(torch.randn(3))
        if draw.random() < 0.5:
            del parameters[draw.choice(sorted(parameters))]
        alive += parameters.values()  # an id is unique only while its object lives
        names |= {id(p): f"{name} of step {step}" for name, p in parameters.items() if id(p) not in names}
        update_optimizer(theirs, parameters, known, reset_state=fresh, remove_params=True)
        follow_model(ours, parameters, known, fresh=fresh)
        known = parameters
        assert content(ours, names) == content(theirs, names)
        for optimizer in (ours, theirs):
            stepped(optimizer)


def test_other_parameters_stay_and_new_heads_join_the_first_group():
    weight, bias, first, second, foreign = (nn.Parameter(torch.randn(2)) for _ in range(5))
    optimizer = SGD([{"params": [weight]}, {"params": [foreign, bias]}], lr=0.1, momentum=0.9)
    known = {"weight": weight, "bias": bias}
    with_first = {**known, "heads.0": first}
    follow_model(optimizer, with_first, known, fresh=False)
    stepped(optimizer)
    follow_model(optimizer, {**known, "heads.1": second}, with_first, fresh=False)
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert held == [[id(weight), id(second)], [id(foreign), id(bias)]]
    assert {id(p) for p, state in optimizer.state.items() if state} == {id(weight), id(foreign), id(bias)}


# Steps by the kernel of a fused Adam ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "eps": 1e-4, "betas": (0.5, 0.9)}, {"maximize": True}])
@pytest.mark.parametrize("kind", [Adam, AdamW])
@torch.no_grad()
def test_a_step_by_the_kernel_equals_a_step_of_the_optimizer(kind, settings):
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
    """An Adam that makes two steps."""

    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)


OTHERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "not fused": lambda p: Adam(p, fused=False),
    "amsgrad": lambda p: Adam(p, fused=True, amsgrad=True),
    "rate as a tensor": lambda p: Adam(p, fused=True, lr=torch.tensor(0.1)),
    "subclass": lambda p: Doubled(p, fused=True),
}


def after_one_step(make):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer, parameter


@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizer_is_left_to_torch(name):
    optimizer, parameter = after_one_step(OTHERS[name])
    before = parameter.detach().clone()
    assert not step_by_kernel(optimizer)
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("around", ["hook", "function", "scheduler", "class"])
def test_an_optimizer_with_a_changed_step_is_left_to_torch(around, monkeypatch):
    optimizer, _ = after_one_step(partial(Adam, fused=True))
    assert step_by_kernel(optimizer)
    if around == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    elif around == "function":
        optimizer.step = lambda: None
    elif around == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # counts steps
    else:
        monkeypatch.setattr(Adam, "step", lambda self, closure=None: None)
    assert not step_by_kernel(optimizer)
