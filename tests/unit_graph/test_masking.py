"""Layers that compute only the open entries of their weights equal layers that compute all entries."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.small_networks import NETWORKS
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.unit_graph import masking
from avalanche_amnesia.unit_graph.graph import OpenEntries
from avalanche_amnesia.unit_graph.masking import LayerMasks

OPERATIONS = {
    "linear": (F.linear, (6, 5), (7, 5), -1, ()),
    "linear of tokens": (F.linear, (6, 5), (2, 3, 5), -1, ()),
    "conv1d": (torch.conv1d, (6, 5, 2), (3, 5, 4), -2, (2,)),
    "conv2d": (torch.conv2d, (6, 5, 3, 3), (3, 5, 4, 4), -3, (1, 1)),
    "conv2d of one image": (torch.conv2d, (6, 5, 3, 3), (5, 4, 4), -3, (1, "same", 2)),
    "conv3d": (torch.conv3d, (6, 5, 1, 2, 2), (3, 5, 2, 3, 3), -4, ()),
}
ROWS = {"some rows": torch.tensor([0, 2, 5]), "all rows": None}
COLUMNS = {"some columns": torch.tensor([1, 4]), "all columns": None}


@pytest.mark.usefixtures("every_entry_counts")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_on_open_entries_equals_the_full_one_with_zeros(operation, rows, columns, bias):
    full, of_weight, of_input, axis, options = OPERATIONS[operation]
    torch.manual_seed(0)
    weight, x = torch.randn(of_weight, dtype=torch.float64), torch.randn(of_input, dtype=torch.float64)
    tensors = [weight, x, torch.randn(6, dtype=torch.float64)] if bias else [weight, x]
    rows, columns = ROWS[rows], COLUMNS[columns]
    open_rows = torch.zeros(6).index_fill(0, torch.arange(6) if rows is None else rows, 1.0).double()
    open_columns = torch.zeros(5).index_fill(0, torch.arange(5) if columns is None else columns, 1.0).double()
    positions = (1,) * (-1 - axis)

    def run(compute):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        weight, x, *rest = leaves
        # Closed units are 0 in a network.
        result = compute(x * open_columns.reshape(-1, *positions), weight, *(rest or [None]))
        result = result * open_rows.reshape(-1, *positions)
        (result**2).sum().backward()
        return [result, *(leaf.grad for leaf in leaves)]

    masks = LayerMasks({}, {"w": OpenEntries(rows, columns, 0.5)})
    found = run(lambda x, w, b: masking.run_open_units(masks, "w", x, w, b, *options))
    expected = run(lambda x, w, b: full(x, w, b, *options))
    for ours, twin in zip(found, expected, strict=True):
        assert ours.shape == twin.shape
        assert torch.allclose(ours, twin, atol=1e-12)
    assert not found[1][(open_rows == 0).nonzero()[:, 0]].any()


@pytest.mark.parametrize("name", ["w", "another"])
def test_small_operations_and_other_weights_are_computed_whole(name):
    """It would cost more to pick the entries."""
    x, w = torch.randn(2, 5), torch.randn(6, 5)
    masks = LayerMasks({}, {name: OpenEntries(torch.tensor([0]), None, 5 / 6)})
    assert torch.equal(masking.run_open_units(masks, "w", x, w, None), F.linear(x, w))


def test_a_large_operation_computes_open_entries_only():
    x, w = torch.randn(512, 128), torch.randn(128, 128)
    masks = LayerMasks({}, {"w": OpenEntries(torch.tensor([3]), None, 127 / 128)})
    result = masking.run_open_units(masks, "w", x, w, None)
    assert torch.allclose(result[:, 3], F.linear(x, w)[:, 3], atol=1e-4)
    assert int((result != 0).any(0).sum()) == 1


def features_and_gradients(model, x, masks, parts):
    """Return features and the gradients of all parameters, in training mode."""
    torch.manual_seed(1)  # of dropout
    features = model.backbone(x, parts, masks)
    leaves = [*model.backbone.parameters(), *parts.parameters()]
    grads = torch.autograd.grad((features**2).sum(), leaves, allow_unused=True)
    return features, [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]


@pytest.mark.usefixtures("every_entry_counts")
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_computes_the_same_from_open_entries(name):
    make, _, options = NETWORKS[name]
    torch.manual_seed(0)
    model = MaskedModel(make(), **options).double().train()
    draw = torch.Generator().manual_seed(3)
    for share in (0.5, 0.8):
        is_open = torch.rand(model.n_units, generator=draw) < share
        for part in model.by_layer(is_open).values():
            part[int(torch.randint(len(part), (), generator=draw))] = True
        soft = is_open * torch.rand(model.n_units, generator=draw).double()
        x = model.graph.inputs.batch(4, draw, next(model.parameters()))
        parts = model.fresh_parts().train()
        entries = model.graph.open_entries(is_open)
        plain = features_and_gradients(model, x, dict(model.by_layer(soft)), copy.deepcopy(parts))
        found = features_and_gradients(model, x, LayerMasks(model.by_layer(soft), entries), copy.deepcopy(parts))
        assert torch.allclose(found[0], plain[0], atol=1e-9)
        for ours, twin in zip(found[1], plain[1], strict=True):
            assert torch.allclose(ours, twin, atol=1e-9)


def test_open_entries_are_the_entries_that_a_mask_reads():
    model = MaskedModel(MLP(10, hidden=(8,), features=6))
    is_open = torch.zeros(14, dtype=torch.bool)
    is_open[[1, 4, 8, 9, 13]] = True
    entries = model.graph.open_entries(is_open)
    assert entries.keys() == {"layers.0.weight", "layers.1.weight"}
    first, second = entries["layers.0.weight"], entries["layers.1.weight"]
    assert (first.rows.tolist(), first.columns) == ([1, 4], None)
    assert (second.rows.tolist(), second.columns.tolist()) == ([0, 1, 5], [1, 4])
    assert (first.saved, second.saved) == pytest.approx((1 - 2 / 8, 1 - 3 / 6 * 2 / 8))
    for name, reads in model.graph.used_entries(model.by_layer(is_open)).items():
        if name in entries:
            rows, columns, _ = entries[name]
            taken = torch.zeros_like(reads.expand(model.backbone.get_parameter(name).shape))
            taken[rows[:, None], torch.arange(10) if columns is None else columns] = True
            assert torch.equal(taken, reads.expand_as(taken))
    assert model.graph.open_entries(torch.ones(14, dtype=torch.bool)) == {}


def test_grouped_convolutions_and_computed_weights_are_computed_whole(monkeypatch):
    asked, run_open_units = [], masking.run_open_units

    def seen(masks, name, *arguments):
        asked.append(name)
        return run_open_units(masks, name, *arguments)

    monkeypatch.setattr(masking, "run_open_units", seen)
    grouped = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 4))
    for backbone, x, whole in ((grouped, torch.rand(2, 4, 2, 2), "3.weight"), (computed, torch.rand(2, 6), "2.weight")):
        model = MaskedModel(backbone, input_shape=tuple(x.shape[1:])).train()
        asked.clear()
        model.masked_features(x, torch.ones(model.n_units))
        assert asked == [whole]
