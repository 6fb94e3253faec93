"""The unit graph equals a slow twin that changes one parameter entry at a time, on small and on random networks."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import examples
from support.small_networks import ALL, COVER_MORE, NETWORKS, Net, inputs, lived_in, network, parameter
from support.soundness_oracle import (
    assert_gradients_are_finite,
    assert_masks_are_sound,
    assert_sound,
    batch,
    some_mask,
    use_by_perturbation,
)
from torch import nn

from avalanche_amnesia import ModelError
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
    mask = some_mask(model, 1, 0.55)
    use, reads = model.graph.parameter_use(model.by_layer(mask)), model.graph.used_entries(model.by_layer(mask))
    reaching = use_by_perturbation(model, mask, x)
    assert set(use) == set(reaching)
    for entries, reaches in reaching.items():
        covered = use[entries].expand_as(reaches)
        assert torch.equal(reads[entries].expand_as(reaches), covered > 0)
        assert not (reaches > covered).any(), f"a leak: {entries}"
        if name not in COVER_MORE:
            assert torch.equal(covered, reaches), f"covered in vain: {entries}"


def assert_closed_features_are_zero(name, model, x):
    """A feature without open units before it is zero."""
    for seed in range(3):
        mask = some_mask(model, seed, 0.55)
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
    graph, masks = model.graph, [some_mask(model, seed, 0.55) for seed in seeds]
    found = graph.parameter_use(*(model.by_layer(mask) for mask in masks))

    def users(number: int) -> int:
        """Return the number of tasks that use a unit of the set."""
        members = graph.sets.members(number)
        return sum(number == 0 or any(bool(mask[unit]) for unit in members) for mask in masks)

    for entries, factors in graph.factors.items():
        shape = model.backbone.get_parameter(entries).shape
        wide = [factor.expand(shape) for factor in factors]
        for place in itertools.product(*map(range, shape)):
            assert float(found[entries].expand(shape)[place]) == min(users(int(factor[place])) for factor in wide)


def test_tracing_keeps_names_and_parameter_objects():
    backbone = MLP(6, hidden=(5,), features=4)
    before = dict(backbone.named_parameters())
    module, graph = trace_backbone(backbone)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert list(graph.layers) == ["layers.0", "layers.1"]


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


Linear, Conv2d, Transposed = nn.Linear, nn.Conv2d, nn.ConvTranspose2d


def adapted(base, a, b) -> nn.Module:
    """A layer without gradients plus a low-rank layer."""
    return Net(lambda s, x: s.base(x) + s.b(torch.tanh(s.a(x))), base=base.requires_grad_(False), a=a, b=b)


ANYWHERE = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "halves": lambda: Net(lambda s, x: torch.cat([torch.tanh(x.chunk(2, 1)[1]), x.chunk(2, 1)[0]], 1)),
    "turned round": lambda: Net(lambda s, x: torch.roll(x.flip(1), 1, 1)),
    "every other": lambda: Net(lambda s, x: torch.cat([x[:, 1::2], -x[:, ::2]], 1)),
    "relu": nn.ReLU,
    "softmax": lambda: nn.Softmax(1),
    "sorted": lambda: Net(lambda s, x: x.sort(1)[0]),
    "running sum": lambda: Net(lambda s, x: torch.cumsum(x, 1)),
    "to length one": lambda: Net(lambda s, x: F.normalize(x + 0.1, dim=1)),
    "of the mean": lambda: Net(lambda s, x: x - x.mean(1, keepdim=True)),
    "dropped": lambda: nn.Dropout(0.3),
}
# 4 channels of 2 by 2 to 4 channels of 2 by 2
ON_IMAGES = ANYWHERE | {
    "convolution": lambda: Conv2d(4, 4, 3, padding=1),
    "depthwise": lambda: Conv2d(4, 4, 3, padding=1, groups=4),
    "grouped": lambda: Conv2d(4, 4, 1, groups=2),
    "transposed": lambda: Transposed(4, 4, 3, padding=1),
    "transposed in groups": lambda: Transposed(4, 4, 1, groups=2),
    "functional": lambda: Net(lambda s, x: F.conv2d(x, s.w, s.v), w=parameter(4, 4, 1, 1), v=parameter(4)),
    "residual": lambda: Net(lambda s, x: x + torch.tanh(s.a(x)), a=Conv2d(4, 4, 1)),
    "three paths": lambda: Net(
        lambda s, x: torch.cat([s.a(x), x[:, 1:3], s.b(x)], 1), a=Conv2d(4, 1, 1), b=Conv2d(4, 1, 3, padding=1)
    ),
    "one module twice": lambda: Net(lambda s, x: s.a(torch.tanh(s.a(x))), a=Conv2d(4, 4, 1)),
    "one module on two branches": lambda: Net(
        lambda s, x: s.a(torch.tanh(s.b(x))) + s.a(x), a=Conv2d(4, 4, 1), b=Conv2d(4, 4, 1)
    ),
    "scaled and shifted": lambda: Net(lambda s, x: x * s.g + s.h, g=parameter(4, 1, 1), h=parameter(4, 2, 2)),
    "shuffled": lambda: nn.ChannelShuffle(2),
    "largest": lambda: nn.MaxPool2d(3, 1, 1),
    "mean": lambda: nn.AvgPool2d(3, 1, 1),
    "batch norm": lambda: lived_in(nn.BatchNorm2d(4)),
    "without bias": lambda: Conv2d(4, 4, 1, bias=False),
    "slopes": lambda: nn.PReLU(4),
    "gate": lambda: Net(lambda s, x: x * torch.sigmoid(s.a(x)), a=Conv2d(4, 4, 1)),
    "product": lambda: Net(lambda s, x: s.b(x) * s.a(x), a=Conv2d(4, 4, 1), b=Conv2d(4, 1, 1)),
    "excited": lambda: Net(lambda s, x: x * torch.sigmoid(s.a(x.mean((2, 3))))[..., None, None], a=Linear(4, 4)),
    "attention": lambda: Net(
        lambda s, x: s.m(h := x.flatten(2).transpose(1, 2), h, h)[0].transpose(1, 2).unflatten(2, (2, 2)),
        m=nn.MultiheadAttention(4, 2, batch_first=True),
    ),
    "mixed positions": lambda: Net(lambda s, x: s.a(x.flatten(2)).unflatten(2, (2, 2)), a=Linear(4, 4)),
    "group norm": lambda: lived_in(nn.GroupNorm(2, 4)),
    "instance norm": lambda: lived_in(nn.InstanceNorm2d(4, affine=True)),
    "layer norm": lambda: lived_in(nn.LayerNorm((4, 2, 2))),
    "layer norm of rows": lambda: lived_in(nn.LayerNorm(2)),
    "adapted": lambda: adapted(Conv2d(4, 4, 3, padding=1), Conv2d(4, 2, 1), Conv2d(2, 4, 1)),
}
# 6 units to 6 units
ON_VECTORS = ANYWHERE | {
    "linear": lambda: Linear(6, 6),
    "functional": lambda: Net(lambda s, x: F.linear(x, s.w[1:], s.v), w=parameter(7, 6), v=parameter(6)),
    "residual": lambda: Net(lambda s, x: x + torch.tanh(s.a(x)), a=Linear(6, 6)),
    "three paths": lambda: Net(lambda s, x: torch.cat([s.a(x), x[:, 2:5], s.b(x)], 1), a=Linear(6, 2), b=Linear(6, 1)),
    "one module twice": lambda: Net(lambda s, x: s.a(torch.tanh(s.a(x))), a=Linear(6, 6)),
    "scaled and shifted": lambda: Net(lambda s, x: x * s.g + s.h, g=parameter(6), h=parameter(6)),
    "batch norm": lambda: lived_in(nn.BatchNorm1d(6)),
    "from the right": lambda: Net(lambda s, x: x @ s.w, w=parameter(6, 6)),
    "slopes": lambda: nn.PReLU(6),
    "gate": lambda: Net(lambda s, x: torch.tanh(x) * torch.sigmoid(s.a(x)), a=Linear(6, 6)),
    "linear unit": lambda: Net(lambda s, x: F.glu(s.a(x)), a=Linear(6, 12)),
    "outer": lambda: Net(
        lambda s, x: (s.a(x)[:, :, None] * s.b(x)[:, None]).flatten(1), a=Linear(6, 2), b=Linear(6, 3)
    ),
    "layer norm": lambda: lived_in(nn.LayerNorm(6)),
    "rms norm": lambda: lived_in(nn.RMSNorm(6)),
    "adapted": lambda: adapted(Linear(6, 6), Linear(6, 3), Linear(3, 6, bias=False)),
}
READS = {
    "an image": (lambda: nn.Identity(), (4, 2, 2)),
    "a vector": (lambda: nn.Unflatten(1, (4, 2, 2)), (16,)),
    "tokens": (lambda: Net(lambda s, x: s.e(x).transpose(1, 2).unflatten(2, (2, 2)), e=nn.Embedding(5, 4)), (4,)),
}


def build(reads, on_images, flat, on_vectors, still) -> tuple[MaskedModel, torch.Tensor]:
    """Return the masked network of a plan, with some modules without gradients, and a batch for it."""
    torch.manual_seed(0)
    first, shape = READS[reads]
    join = [nn.Flatten(), Linear(16, 6)] if flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), Linear(4, 6)]
    images, vectors = (ON_IMAGES[name]() for name in on_images), (ON_VECTORS[name]() for name in on_vectors)
    network = nn.Sequential(first(), *images, *join, nn.Tanh(), *vectors, Linear(6, 3))
    for module, learns_nothing in zip(network, still, strict=False):
        module.requires_grad_(not learns_nothing)
    model = MaskedModel(network, input_shape=shape, trial=False)
    return model.eval(), inputs(model, shape, 32)


PLANS = st.tuples(
    st.sampled_from(sorted(READS)),
    st.lists(st.sampled_from(sorted(ON_IMAGES)), max_size=3),
    st.booleans(),
    st.lists(st.sampled_from(sorted(ON_VECTORS)), max_size=3),
)


@settings(max_examples=examples(26), deadline=None, derandomize=True)
@given(
    plan=PLANS,
    still=st.just([]) | st.just([]) | st.lists(st.booleans(), min_size=6, max_size=12),  # mostly all modules learn
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.2, 0.5, 0.8]),
)
def test_no_entry_outside_a_mask_reaches_a_feature(plan, still, seed, share):
    try:
        model, x = build(*plan, still)
    except ModelError as error:
        assume("no weighted layer to mask" not in str(error))
        raise
    mask = torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < share
    all_learn = all(parameter.requires_grad for parameter in model.backbone.parameters())
    assert_sound(model, x[:5], mask, reaches=all_learn)  # else a closed mask leaves a network that computes something
