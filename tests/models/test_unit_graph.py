"""The unit graph against a twin that moves one parameter at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import NETWORKS, network, random_mask, use_by_perturbation
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel, trace_backbone


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", [1, 2])
def test_parameter_use_equals_brute_force(name, seed):
    model, x = network(name)
    mask = random_mask(model, seed)
    of_layer, of_features = use_by_perturbation(model, mask, x)
    use = model.graph.parameter_use(model.by_layer(mask))
    assert set(use) == set(of_layer)
    for parameter, changed in of_layer.items():
        covered = use[parameter].expand_as(changed)
        assert torch.equal(covered, changed), parameter
        assert not (of_features[parameter] > covered).any(), parameter  # what the mask leaves out reaches no feature


@pytest.mark.parametrize("name", NETWORKS)
def test_an_open_mask_leaves_the_backbone_as_it_was(name):
    make, shape, options = NETWORKS[name]
    torch.manual_seed(0)
    backbone = make().eval()
    x = torch.randn(5, *shape)
    expected = backbone(x)
    model = MaskedModel(backbone, **options).eval()
    assert torch.equal(model.masked_features(x, torch.ones(model.n_units)), expected)
    assert model.n_features == expected.shape[1] == model.graph.output.size


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_with_different_masks_equal_each_mask_alone(name):
    model, x = network(name)
    masks = torch.stack([random_mask(model, seed) for seed in range(len(x))])
    together = model.masked_features(x, masks)
    alone = torch.cat([model.masked_features(row[None], mask) for row, mask in zip(x, masks, strict=True)])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_closed_output_units_are_zero_features(name):
    model, x = network(name)
    for seed in range(3):
        mask = random_mask(model, seed)
        used = model.graph.output.usage(model.by_layer(mask.float()))
        features = model.masked_features(x, mask)
        if name not in ("lenet", "mlp"):  # no lifting operation behind the last layer in any of these
            assert torch.equal((features != 0).any(0), used > 0)
        assert bool((features[:, used == 0] == 0).all())


def test_sources_by_name():
    graph = network("three branches")[0].graph
    masks = {"a": torch.tensor([1.0, 0, 1]), "b": torch.tensor([0.0, 1]), "c": torch.ones(4)}
    assert graph.layers["c"].sources.usage(masks).tolist() == [1, 0, 1, *[1] * 6, 0, 1]
    residual = network("residual 1x1")[0].graph
    masks = {
        name: torch.tensor(value)
        for name, value in {
            "first": [1.0, 0, 0],
            "second": [0.0, 1, 0],
            "shortcut": [0.0, 0, 0],
            "last": [1.0, 1, 0, 0],
        }.items()
    }
    assert residual.layers["shortcut"].sources.usage(masks).tolist() == [1, 0, 0]
    assert residual.layers["last"].sources.usage(masks).tolist() == [0.0] * 9 + [1.0] * 9 + [0.0] * 9


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["mlp", "lenet", "residual 1x1", "three branches", "grouped", "shared by branches"]),
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=4),
)
def test_several_masks_give_the_minimum_of_the_summative_masks(name, seeds):
    model, _ = network(name)
    masks = [random_mask(model, seed).float() for seed in seeds]
    use = model.graph.parameter_use(*(model.by_layer(mask) for mask in masks))
    counts = model.by_layer(sum(masks))
    for layer_name, layer in model.graph.layers.items():
        of_inputs = sum(layer.sources.usage(model.by_layer(mask)) for mask in masks)
        weight = model.backbone.get_submodule(layer_name).weight
        expected = torch.empty_like(weight)
        rows_per_group, columns = weight.shape[0] // layer.groups, weight.shape[1]
        for i in range(weight.shape[0]):
            for j in range(columns):
                source = of_inputs[(i // rows_per_group) * columns + j]
                expected[i, j] = min(float(counts[layer_name][i]), float(source))
        assert torch.equal(use[f"{layer_name}.weight"].expand_as(weight), expected)


def test_tracing_keeps_names_and_parameter_objects():
    backbone = MLP(6, hidden=(5,), features=4)
    before = dict(backbone.named_parameters())
    module, graph = trace_backbone(backbone)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert list(graph.layers) == ["layers.0", "layers.1"]


def test_functional_dropout_follows_the_mode_it_runs_in():
    for trained in (True, False):
        make, shape, _ = NETWORKS["dropout"]
        torch.manual_seed(0)
        model = MaskedModel(make().train(trained))
        x, mask = torch.randn(64, *shape), torch.ones(model.n_units)
        model.eval()
        assert torch.equal(model.masked_features(x, mask), model.masked_features(x, mask))
        model.train()
        assert not torch.equal(model.masked_features(x, mask), model.masked_features(x, mask))


def test_mask_gradients_equal_a_finite_difference():
    model, x = network("residual 1x1")
    model.double()
    x, mask = x.double(), torch.rand(model.n_units, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: model.backbone(x[:2], model.by_layer(m)), (mask,))


def test_tied_module_called_twice_is_one_layer():
    model, _ = network("twice")
    assert list(model.graph.layers) == ["first", "again", "last"]
    assert model.n_units == 11
    assert isinstance(model.backbone.get_submodule("again"), nn.Linear)
