"""Masks and heads of a trained model: mixed batches, state dicts, copies, errors."""

import copy

import pytest
import torch
from support.small_networks import NETWORKS
from support.strategies import ConvNet, learn

from avalanche_amnesia import HAT, MLP, MaskedModel, SplitDigits, task_benchmark
from avalanche_amnesia.models import UnknownTaskError


def build(kind: str) -> MaskedModel:
    return MaskedModel(ConvNet() if kind == "conv" else MLP(64, hidden=(20,), features=12, dropout=0.2))


def digits():
    return SplitDigits(1, n_train=300).train_stream[0].tensors


@pytest.fixture(scope="module", params=["mlp", "conv"])
def trained(request):
    """A model after three tasks with 2, 5 and 3 classes."""
    torch.manual_seed(0)
    model = build(request.param)
    data = digits()
    benchmark = task_benchmark(data, data, [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]])
    strategy = HAT(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), train_mb_size=32)
    learn(strategy, benchmark.train_stream)
    return model.eval(), benchmark, request.param, strategy


def test_masks_are_bool_for_each_layer_and_differ_between_tasks(trained):
    model, _, _, _ = trained
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
    model, benchmark, _, _ = trained
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


def test_an_unknown_task_is_refused(trained):
    model, benchmark, _, _ = trained
    x = benchmark.test_stream[0].tensors[0][:4]
    with pytest.raises(UnknownTaskError, match=r"task 9 has no head.*\[0, 1, 2\]"):
        model(x, 9)
    with pytest.raises(UnknownTaskError, match="task 9"):
        model(x, torch.tensor([0, 1, 9, 0]))
    with pytest.raises(UnknownTaskError, match="task 9 has no mask"):
        model.binary_mask(9)


def test_a_removed_task_leaves_nothing(trained):
    model = copy.deepcopy(trained[0])
    model.remove_task(1)
    assert model.tasks == (0, 2)
    assert list(model.masks) == [0, 2]
    assert not [name for name in model.state_dict() if name.endswith(".1") or (".1." in name and "heads" in name)]
    assert torch.equal(model.cumulative_mask(), model.binary_mask(0) | model.binary_mask(2))


def test_the_gate_is_soft_in_training_and_binary_in_evaluation():
    model = MaskedModel(NETWORKS["sigmoid"][0]())
    model.add_head(0, 2)
    x = torch.randn(5, 6)
    model.start_task(0, torch.randn(model.n_units))
    gate = model.gate.open(3.0)
    assert torch.equal(gate, torch.sigmoid(3.0 * model.embedding.detach()))
    assert torch.equal(model.train().features(x, 0), model.masked_features(x, gate))
    binary = (model.embedding.detach() > 0).float()
    assert torch.equal(model.eval().features(x, 0), model.masked_features(x, binary))
    with pytest.raises(ValueError, match="can't start"):
        model.start_task(1, torch.randn(model.n_units))
    model.drop_current_task()
    assert model.tasks == ()
    assert dict(model.masks) == {}
    assert model.embedding is None
