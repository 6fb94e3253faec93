"""Containers of tasks' own modules: what they skip is what had nothing to change."""

import random

import pytest
import torch
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel
from avalanche_amnesia.models.per_task import PerTask, lies_on


def parts():
    return {str(task): nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for task in range(4)}


def modes(module):
    return {name: part.training for name, part in module.named_modules()}


@pytest.mark.parametrize("seed", range(5))
def test_modes_are_those_of_a_plain_container(seed):
    chosen = random.Random(seed)
    mine, plain = PerTask(parts()), nn.ModuleDict(parts())
    for _ in range(20):
        if chosen.random() < 0.5:
            mode = chosen.random() < 0.5
            assert mine.train(mode) is mine
            plain.train(mode)
        else:  # somebody sets a part by hand
            name, mode = chosen.choice([name for name in modes(plain) if name]), chosen.random() < 0.5
            mine.get_submodule(name).training = plain.get_submodule(name).training = mode
        assert modes(mine) == modes(plain)


def test_what_does_not_learn_stays_in_evaluation_mode():
    mine = PerTask(parts())
    mine["1"].learning = False
    for mode in (True, False, True):
        mine.train(mode)
        assert all(part.training == (mode and task != "1") for task, top in mine.items() for part in top.modules())


@pytest.mark.parametrize("model_class", [MaskedModel, SubnetModel])
def test_a_model_moves_unless_all_of_it_lies_there(model_class, monkeypatch):
    model = model_class(
        MLP(3, hidden=(2,), features=2), **({"input_shape": (3,)} if model_class is MaskedModel else {})
    )
    model.add_head(0, 2)
    moves = []
    monkeypatch.setattr(model, "_apply", lambda *given, **options: moves.append(given))
    assert model.to("cpu") is model
    assert not moves
    monkeypatch.undo()
    model.heads["0"].to("meta")
    assert not lies_on(model, torch.device("cpu"))
    model.to(torch.device("meta"))
    assert lies_on(model, torch.device("meta"))
    assert model.backbone.get_parameter("layers.0.weight").is_meta
    model = model_class(
        MLP(3, hidden=(2,), features=2), **({"input_shape": (3,)} if model_class is MaskedModel else {})
    )
    assert next(model.to("cpu", torch.float64).parameters()).dtype == torch.float64


def test_one_buffer_elsewhere_is_enough():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert lies_on(model, torch.device("cpu"))
    model[0].running_mean = model[0].running_mean.to("meta")
    assert not lies_on(model, torch.device("cpu"))
