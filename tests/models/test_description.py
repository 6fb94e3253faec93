"""The utilisation table of a masked model, compared with loops over its masks."""

import pytest
import torch
from support.small_networks import Net
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.models.description import utilisation


def model_with(tasks) -> MaskedModel:
    torch.manual_seed(0)
    model = MaskedModel(MLP(6, hidden=(5, 9), features=4))
    for task in tasks:
        model.add_head(task, 2)
        model.start_task(task, torch.randn(model.n_units))
        model.finish_task()
    return model


def column(table, name):
    return [row[name] for row in table.values()]


def test_counts_and_shares_equal_those_of_the_masks():
    model = model_with([2, 0, 7])
    counts, shares = utilisation(model, counts=True), utilisation(model)
    layers = list(model.graph.layers)
    for table in (counts, shares):
        assert list(table) == [*layers, "all"]
        assert all(list(row) == [2, 0, 7, "any", "units"] for row in table.values())
        assert column(table, "units") == [5, 9, 4, 18]
    for task in (2, 0, 7):
        by_hand = [sum(bool(unit) for unit in model.masks[task][layer]) for layer in layers]
        assert column(counts, task) == [*by_hand, sum(by_hand)]
        assert column(shares, task) == [a / n for a, n in zip([*by_hand, sum(by_hand)], [5, 9, 4, 18], strict=True)]
    some = []
    for layer, units in zip(layers, (5, 9, 4), strict=True):
        some.append(sum(any(bool(model.masks[task][layer][unit]) for task in (2, 0, 7)) for unit in range(units)))
    assert column(counts, "any") == [*some, sum(some)]
    assert all(type(n) is int for row in counts.values() for n in row.values())
    assert [type(n) for n in shares["all"].values()] == [float] * 4 + [int]


def test_a_layer_called_all_is_refused():
    model = MaskedModel(Net(lambda net, x: torch.relu(net.all(x)), all=nn.Linear(3, 2)))
    with pytest.raises(ValueError, match="a layer of the model is called 'all'"):
        utilisation(model)
