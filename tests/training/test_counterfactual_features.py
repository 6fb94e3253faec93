"""Features without given tasks, through a task's mask: those of a pass over all units, statistics included."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from support.export_networks import HALF, NETWORKS, SPARSE, batch, trained
from torch.overrides import TorchFunctionMode

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


class Counts(TorchFunctionMode):
    """Notes how many units every linear layer computes."""

    def __init__(self):
        super().__init__()
        self.units = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            self.units.append(len(args[1]))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("part", [None, slice(1, None, 3)])
def test_of_a_first_layer_only_what_it_has_not_seen_is_computed(part):
    model, x = trained("mlp").double(), batch("mlp", 12).double()
    made = CounterfactualFeatures(model, HALF, x, 6)
    first = next(model.backbone.parameters())
    seen = first[2].clone()
    for _ in range(2):
        made.see()
        first[2:4] += 0.1
    first[2] = seen
    with Counts() as counts:
        features, _ = made(part)
    assert counts.units[0] == 1
    samples = x if part is None else x[part]
    assert torch.allclose(features, over_all_units(model, HALF, samples, 6)[0], atol=1e-12)
