"""The optimizer follows added, replaced and removed parameters of the model, as Avalanche's function does."""

import random

import pytest
import torch
from avalanche.models.dynamic_optimizers import update_optimizer
from torch import nn
from torch.optim import SGD

from avalanche_amnesia.optimizers import follow_model


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
