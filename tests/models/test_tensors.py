"""A model's tensors by name are those that torch's own walks give."""

import pytest
import torch
from support.small_runs import masked_mlp
from torch import nn
from torch.nn.utils import parametrizations

from avalanche_amnesia.models import MLP, SubnetModel
from avalanche_amnesia.models.tensors import parameters_of, state_of


def with_tasks(model):
    for task in range(3):
        model.add_head(task, 2)
    return model


def shared():
    twice = nn.Linear(2, 2)
    model = nn.Sequential(twice, nn.BatchNorm1d(2), twice, nn.Sequential(nn.Linear(2, 2), nn.Identity()))
    model[3][0].weight = model[0].weight
    model.register_module("none", None)
    model.register_buffer("not_kept", torch.ones(2), persistent=False)
    model.register_parameter("no", None)
    return model


class WithMore(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}


def hooked():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_state_dict_post_hook(without_bias)
    return model


def without_bias(module, state, prefix, local):
    del state[f"{prefix}bias"]


MODELS = {
    "masked": lambda: with_tasks(masked_mlp()),
    "subnets": lambda: with_tasks(SubnetModel(MLP(4, hidden=(3,), features=2))),
    "shared parts": shared,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "extra state": lambda: nn.Sequential(WithMore(2, 2)),
    "hooked": hooked,
    "lstm": lambda: nn.LSTM(2, 3, bidirectional=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_both_walks_agree(kind):
    model = MODELS[kind]()
    ours, theirs = parameters_of(model), dict(model.named_parameters())
    assert list(ours) == list(theirs)
    assert all(ours[name] is theirs[name] for name in theirs)
    ours, theirs = state_of(model), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == value if isinstance(value, dict) else same(ours[name], value)


def same(one, other):
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
