"""Features without given tasks, through a task's mask: those of a pass over all units, statistics included."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.feature_networks import HALF, NETWORKS, SPARSE, batch, trained
from support.strategy_state import bits

from avalanche_amnesia.training import head_fit
from avalanche_amnesia.training.head_fit import CounterfactualFeatures
from avalanche_amnesia.training.norm_statistics import retake, running_norms


@torch.no_grad()
def over_all_units(model, task, x, mb_size):
    """Features where closed units are computed, and closed by the mask behind them; whether norms have statistics."""
    parts, masks = deepcopy(model.task_parts(task)), model.by_layer(model.binary_mask(task).double())
    model.eval()
    norms = running_norms(parts)
    if norms:
        retake(norms, x.split(mb_size), lambda part: model.backbone(part, parts, masks))
    return model.backbone(x, parts, masks), bool(norms)


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("task", [HALF, SPARSE])
def test_they_are_those_of_a_pass_over_all_units(name, task):
    model, x = trained(name, seed=int(name == "tokens")).double(), batch(name, 12)
    x = x.double() if x.is_floating_point() else x
    before = bits(model)
    expected, has_statistics = over_all_units(model, task, x, 6)
    found = CounterfactualFeatures(model, task, x, x.split(6))
    statistics, features = found(), found.features
    assert task != HALF or features.abs().max() > 1e-3  # a twentieth of the units may let nothing through
    assert torch.allclose(features, expected, atol=1e-8 * float(expected.abs().max().clamp_min(1)))
    assert bits(model) == before
    buffers = dict(model.task_parts(task).named_buffers())
    assert set(statistics) == (set(buffers) if has_statistics else set())
    for name, value in statistics.items():
        buffers[name].copy_(value)
    assert torch.equal(model.features(x, task), features)


@pytest.mark.parametrize(("name", "limit", "size"), [("lenet", 0.0, 32), ("lenet", 1e10, 512), ("mlp", 0.0, 2048)])
def test_a_large_network_takes_few_images_at_a_time_and_rows_are_many(monkeypatch, name, limit, size):
    monkeypatch.setattr(head_fit, "LARGE", limit)
    assert CounterfactualFeatures(trained(name), HALF, batch(name, 12), ())._batch == size


@torch.no_grad()
@pytest.mark.parametrize("part", [slice(None), slice(1, None, 3)])
def test_units_of_a_first_layer_are_computed_in_two_states_and_else_where_they_differ(part, monkeypatch):
    model, x = trained("mlp").double(), batch("mlp", 12).double()
    weight, opened = next(model.backbone.parameters()), model.masks[HALF]["layers.0"].nonzero()[:, 0]
    features, before = CounterfactualFeatures(model, HALF, x, ()), weight.clone()
    computed = []

    def counted(x, weight, *bias):
        computed.append((len(x), len(weight)))
        return F.linear(x, weight, *bias)

    monkeypatch.setattr(head_fit, "F", SimpleNamespace(linear=counted))
    for state in (before, before + 0.1):
        weight.copy_(state)
        features(slice(1))
    for moved in ({0: 0.1}, {1: 0.1, 2: 0.3}, {0: 0.1, 1: 0.1}):
        weight.copy_(before)
        for unit, by in moved.items():
            weight[opened[unit]] += by
        features(part)
        assert torch.allclose(features.features[part], over_all_units(model, HALF, x[part], 6)[0], atol=1e-12)
    assert computed == [(12, 2 * len(opened) + 1), (len(x[part]), 1)]


def test_results_of_a_first_layer_that_would_take_too_much_are_not_kept(monkeypatch):
    monkeypatch.setattr(head_fit, "MOST_KEPT", 100)
    model, x = trained("mlp"), batch("mlp", 12)
    features = CounterfactualFeatures(model, HALF, x, ())
    for _ in range(3):
        features()
    assert not any(features._first_layers._kept.values())
    assert torch.equal(features.features, model.features(x, HALF))
