"""The unit graph equals a slow twin that changes one parameter entry at a time."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_networks import ALL, COVER_MORE, NETWORKS, network
from support.soundness_oracle import (
    assert_gradients_are_finite,
    assert_masks_are_sound,
    batch,
    random_mask,
    some_mask,
    use_by_perturbation,
)
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.unit_graph.tracing import trace_backbone


@pytest.mark.parametrize("name", ALL)
def test_a_network_is_covered_soundly_and_no_more_than_needed(name):
    """One test checks everything, because tracing takes longest."""
    model, x = network(name)
    assert model.n_features == len(model.graph.output)
    assert_use_equals_brute_force(name, model, x)
    assert_closed_features_are_zero(name, model, x)
    make, shape, options = ALL[name]
    torch.manual_seed(0)
    original = make().eval()
    model = MaskedModel(copy.deepcopy(original), **options).eval()
    tokens = 5 if name == "embedding" else None
    assert_masks_are_sound(model, original, lambda size: batch(shape, size, tokens), sizes=(1, 3, 7))
    gate = torch.rand(model.n_units, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for mask in (gate, some_mask(model, 1).float().requires_grad_()):
        assert_gradients_are_finite(model.train(), x[:7], mask)


def assert_use_equals_brute_force(name, model, x):
    mask = random_mask(model, 1)
    use, reads = model.graph.parameter_use(model.by_layer(mask)), model.graph.reads(model.by_layer(mask))
    reaching = use_by_perturbation(model, mask, x)
    assert set(use) == set(reaching)
    for parameter, reaches in reaching.items():
        covered = use[parameter].expand_as(reaches)
        assert torch.equal(reads[parameter].expand_as(reaches), covered > 0)
        assert not (reaches > covered).any(), f"a leak: {parameter}"
        if name not in COVER_MORE:
            assert torch.equal(covered, reaches), f"covered in vain: {parameter}"


def assert_closed_features_are_zero(name, model, x):
    """A feature without open units before it is zero."""
    for seed in range(3):
        mask = random_mask(model, seed)
        open_ = model.graph.sets.use(mask.float())[model.graph.output] > 0
        found = model.masked_features(x, mask)
        assert bool((found[:, ~open_] == 0).all())
        if name in NETWORKS and name not in ("lenet", "mlp", "features summed"):  # closed by a ReLU, or summed over
            assert bool((found[:, open_] != 0).any(0).all())


def test_the_sources_of_a_layer_follow_branches_and_residual_paths():
    graph = network("three branches")[0].graph
    of_sets = graph.sets.use(torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1, 1]))  # a, b and c, one after the other
    assert of_sets[graph.sources("c")].tolist() == [1, 0, 1, *[1] * 6, 0, 1]
    residual = network("residual 1x1")[0].graph
    assert list(residual.layers) == ["first", "second", "shortcut", "last"]
    of_sets = residual.sets.use(torch.tensor([1.0, 0, 0, *(0, 1, 0), *(0, 0, 0), *(1, 1, 0, 0)]))
    assert of_sets[residual.sources("shortcut")].tolist() == [1, 0, 0]
    assert of_sets[residual.sources("last")].tolist() == [0.0] * 9 + [1.0] * 9 + [0.0] * 9


@settings(max_examples=15, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(ALL)), seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_several_masks_give_the_minimum_of_the_summative_masks(name, seeds):
    model, _ = network(name)
    graph, masks = model.graph, [random_mask(model, seed) for seed in seeds]
    found = graph.parameter_use(*(model.by_layer(mask) for mask in masks))

    def users(number: int) -> int:
        """Return the number of tasks that use a unit of the set."""
        members = graph.sets.members(number)
        return sum(number == 0 or any(bool(mask[unit]) for unit in members) for mask in masks)

    for parameter, factors in graph.factors.items():
        shape = model.backbone.get_parameter(parameter).shape
        wide = [factor.expand(shape) for factor in factors]
        for entry in itertools.product(*map(range, shape)):
            expected = min(users(int(factor[entry])) for factor in wide)
            assert float(found[parameter].expand(shape)[entry]) == expected


def test_tracing_keeps_names_and_parameter_objects():
    backbone = MLP(6, hidden=(5,), features=4)
    before = dict(backbone.named_parameters())
    module, graph = trace_backbone(backbone)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert list(graph.layers) == ["layers.0", "layers.1"]


def test_functional_dropout_follows_the_mode():
    for trained in (True, False):
        make, shape, _ = NETWORKS["dropout"]
        torch.manual_seed(0)
        model = MaskedModel(make().train(trained))
        x, mask = torch.randn(64, *shape), torch.ones(model.n_units)
        model.eval()
        assert torch.equal(model.masked_features(x, mask), model.masked_features(x, mask))
        model.train()
        assert not torch.equal(model.masked_features(x, mask), model.masked_features(x, mask))


@pytest.mark.parametrize("name", ["residual 1x1", "layer norm", "product of branches", "class token and positions"])
def test_mask_gradients_equal_a_finite_difference(name):
    model, x = network(name)
    model.double()
    own = model.fresh_parts()
    x, mask = x[:2].double(), (torch.rand(model.n_units, dtype=torch.float64) * 0.9 + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: model.backbone(x, own, model.by_layer(m)), (mask,))


def test_a_module_called_twice_is_one_layer():
    model, _ = network("twice")
    assert list(model.graph.layers) == ["first", "again", "last"]
    assert model.n_units == 11
    assert isinstance(model.backbone.get_submodule("again"), nn.Linear)
    assert list(network("one module under two names")[0].graph.layers) == ["0", "4"]
