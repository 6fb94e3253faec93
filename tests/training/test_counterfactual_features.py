"""Features without given tasks, through a task's mask: those of a pass over all units, statistics included."""

from copy import deepcopy

import pytest
import torch
from support.export_networks import HALF, NETWORKS, SPARSE, batch, trained

from avalanche_amnesia.bits import state_hashes
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
    before = state_hashes(model.state_dict())
    expected, has_statistics = over_all_units(model, task, x, 6)
    features, statistics = CounterfactualFeatures(model, task, x, 6)()
    assert task != HALF or features.abs().max() > 1e-3  # a twentieth of the units may let nothing through
    assert torch.allclose(features, expected, atol=1e-8 * float(expected.abs().max().clamp_min(1)))
    assert state_hashes(model.state_dict()) == before
    buffers = dict(model.task_parts(task).named_buffers())
    assert set(statistics) == (set(buffers) if has_statistics else set())
    for name, value in statistics.items():
        buffers[name].copy_(value)
    assert torch.equal(model.features(x, task), features)


@pytest.mark.parametrize(("name", "limit", "size"), [("lenet", 0.0, 32), ("lenet", 1e10, 512), ("mlp", 0.0, 4096)])
def test_a_large_network_takes_few_images_at_a_time_and_rows_are_many(monkeypatch, name, limit, size):
    monkeypatch.setattr(head_fit, "LARGE", limit)
    assert CounterfactualFeatures(trained(name), HALF, batch(name, 12), 6)._batch == size


@torch.no_grad()
@pytest.mark.parametrize("part", [None, slice(1, None, 3)])
def test_features_of_a_part_are_those_of_its_samples(part):
    model, x = trained("mlp").double(), batch("mlp", 12).double()
    features, _ = CounterfactualFeatures(model, HALF, x, 6)(part)
    samples = x if part is None else x[part]
    assert torch.allclose(features, over_all_units(model, HALF, samples, 6)[0], atol=1e-12)
