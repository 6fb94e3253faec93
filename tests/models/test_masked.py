"""Masks and heads of a masked model: mixed batches, errors, signs of masked zeros, and the table of utilisation."""

import pytest
import torch
from support.small_networks import NETWORKS, Net, parameter
from support.strategies import ConvNet, learn
from torch import nn

from avalanche_amnesia import HAT, SplitDigits, task_benchmark
from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel


@pytest.fixture(scope="module", params=["mlp", "conv"])
def trained(request):
    """A model after three tasks with 2, 5 and 3 classes."""
    torch.manual_seed(0)
    conv = request.param == "conv"
    model = MaskedModel(ConvNet() if conv else MLP(64, hidden=(20,), features=12, dropout=0.2))
    data = SplitDigits(1, n_train=300).train_stream[0].tensors
    benchmark = task_benchmark(data, data, [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]])
    strategy = HAT(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), train_mb_size=32)
    learn(strategy, benchmark.train_stream)
    return model.eval(), benchmark


def test_masks_are_bool_for_each_layer_and_differ_between_tasks(trained):
    model, _ = trained
    assert list(model.masks) == [0, 1, 2] == list(model.tasks)
    for task, masks in model.masks.items():
        assert list(masks) == list(model.graph.layers)
        for name, mask in masks.items():
            assert mask.dtype == torch.bool
            assert mask.shape == (model.graph.layers[name].units,)
        assert torch.equal(torch.cat(list(masks.values())), model.binary_mask(task))
        assert torch.equal(model.binary_mask(task), model.task_embedding(task) > 0)
    assert not torch.equal(model.binary_mask(0), model.binary_mask(1))
    union = model.binary_mask(0) | model.binary_mask(1) | model.binary_mask(2)
    assert torch.equal(model.cumulative_mask(), union)
    with pytest.raises(TypeError):
        model.masks[0]["new"] = 1


def test_each_row_of_a_mixed_batch_equals_its_own_task(trained):
    model, benchmark = trained
    parts = [(e.tensors[0][:9], t) for t, e in enumerate(benchmark.test_stream)]
    x = torch.cat([part for part, _ in parts])
    labels = torch.cat([torch.full((len(part),), t) for part, t in parts])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    mixed = model(x[order], labels[order])
    assert mixed.shape == (27, 5)
    for row, index in zip(mixed, order, strict=True):
        own = model(x[index : index + 1], int(labels[index]))[0]
        assert torch.allclose(row[: len(own)], own, atol=1e-5)
        assert row[len(own) :].tolist() == [-1000.0] * (5 - len(own))
    two = labels != 1
    assert model(x[two], labels[two]).shape == (18, 3)


def test_the_gate_is_soft_in_training_and_binary_in_evaluation():
    model = MaskedModel(NETWORKS["sigmoid"][0]())
    model.add_head(0, 2)
    x = torch.randn(5, 6)
    model.start_task(0, torch.randn(model.n_units))
    gate = model.gate.update(3.0)
    assert torch.equal(gate, torch.sigmoid(3.0 * model.embedding.detach()))
    assert torch.equal(model.train().features(x, 0), model.masked_features(x, gate))
    assert torch.equal(model.eval().features(x, 0), model.masked_features(x, (model.embedding.detach() > 0).float()))
    with pytest.raises(ValueError, match="can't start"):
        model.start_task(1, torch.randn(model.n_units))
    model.drop_current_task()
    assert model.tasks == ()
    assert dict(model.masks) == {}
    assert model.embedding is None


NORMS = {
    "batch": lambda: nn.BatchNorm1d(8),
    "batch without parameters": lambda: nn.BatchNorm1d(8, affine=False),
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "learned slopes": lambda: nn.PReLU(8),
    "none": nn.Identity,
}


def reads_signs(norm, scaled=False):
    def forward(s, x):
        h = s.norm(s.first(x))
        if scaled:
            h = h * s.scale
        return torch.copysign(torch.ones_like(h), h) + torch.atan2(h, -torch.ones_like(h))

    scale = {"scale": parameter(8)} if scaled else {}
    return Net(forward, first=nn.Linear(6, 8), norm=NORMS[norm](), features=8, **scale)


CASES = [*((norm, False, True) for norm in NORMS), ("none", True, False), ("batch", True, False)]


@pytest.mark.parametrize(("norm", "scaled", "training"), CASES)
def test_the_sign_of_a_closed_unit_reaches_no_task(norm, scaled, training):
    model = MaskedModel(reads_signs(norm, scaled))
    model.add_head(0, 2)
    model.start_task(0, torch.randn(model.n_units))
    model.finish_task()
    model.train(training)
    x, own = torch.randn(5, 6), model.task_parts(0)
    before = model.features(x, 0)
    use = model.graph.parameter_use(model.masks[0])
    with torch.no_grad():
        for name, parameter in model.backbone.named_parameters():
            if name in use:
                parameter.copy_(torch.where((use[name] > 0).expand_as(parameter), parameter, -3 * parameter))
    assert torch.equal(before.view(torch.int32), model.masked_features(x, model.binary_mask(0), own).view(torch.int32))


@pytest.mark.parametrize("training", [False, True])
def test_the_sign_of_a_weight_outside_the_subnetwork_reaches_no_task(training):
    def reads_weights(s, x):
        return s.first(x) + torch.copysign(torch.ones(8), s.first.weight.amin(1))

    model = SubnetModel(Net(reads_weights, first=nn.Linear(6, 8), features=8), density=0.3)
    with torch.no_grad():
        model.backbone.first.weight.abs_()
    model.add_head(0, 2)
    model.start_task(0, torch.randn(model.n_weights))
    model.train(training)
    x = torch.randn(5, 6)
    before = model.features(x, 0).detach().clone()
    outside = ~model.by_layer(model.binary_mask(0))["first.weight"].view(8, 6)
    with torch.no_grad():
        model.backbone.first.weight[outside] *= -1
    model.choose_weights()
    assert torch.equal(before, model.features(x, 0))


def column(table, name):
    return [row[name] for row in table.values()]


def test_counts_and_shares_equal_those_of_the_masks():
    torch.manual_seed(0)
    model = MaskedModel(MLP(6, hidden=(5, 9), features=4))
    for task in (2, 0, 7):
        model.add_head(task, 2)
        model.start_task(task, torch.randn(model.n_units))
        model.finish_task()
    counts, shares = model.utilisation(counts=True), model.utilisation()
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
