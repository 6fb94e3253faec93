"""Backbones that MaskedModel accepts: several inputs, free sizes, declared modules, several heads, Hugging Face's."""

import copy
import functools
import pickle

import pytest
import torch
from support import tiny
from support.hugging_face_networks import BACKBONES, tokens
from support.small_networks import Net
from support.soundness_oracle import (
    assert_gradients_are_finite,
    assert_masks_are_sound,
    assert_sound,
    features,
    some_mask,
)
from support.strategy_state import same_state, state
from torch import nn

from avalanche_amnesia import MaskedModel, ModelError, validate


def two_tensors():
    """The sum of two layers, one for each input."""
    layers = {"a": nn.Linear(6, 5), "b": nn.Linear(3, 5), "c": nn.Linear(5, 4)}
    return Net(lambda s, left, right: s.c(torch.tanh(s.a(left) + s.b(right))), **layers)


def pooled(s, input_ids, attention_mask):
    """Return a mapping with the mean of the embeddings of all tokens except padding."""
    share = attention_mask.unsqueeze(-1).to(s.e.weight.dtype)
    states = torch.tanh(s.e(input_ids))
    return {"states": states, "pooled": s.c((states * share).sum(1) / share.sum(1))}


def words():
    return Net(pooled, e=nn.Embedding(9, 6), c=nn.Linear(6, 4), features=4)


LEFT, RIGHT = torch.randn(2, 6), torch.randn(2, 3)
TOKENS = {"input_ids": torch.randint(9, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
CASES = {
    "tuple": (two_tensors, (LEFT, RIGHT)),
    "names": (two_tensors, {"right": RIGHT, "left": LEFT}),
    "a mapping of tokens": (words, TOKENS),
    "one tensor": (lambda: nn.Linear(6, 4), LEFT),
}


def rows(x, index):
    """Return some samples of a batch."""
    if isinstance(x, dict):
        return {name: part[index] for name, part in x.items()}
    return tuple(part[index] for part in x) if isinstance(x, tuple) else x[index]


def assert_open_mask_computes(model, backbone, x):
    with torch.no_grad():
        plain = backbone(**x) if isinstance(x, dict) else backbone(*x) if isinstance(x, tuple) else backbone(x)
        expected = plain["pooled"] if isinstance(plain, dict) else plain
        assert torch.allclose(model.masked_features(x, torch.ones(model.n_units)), expected, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_batches_may_have_any_form_and_size(name):
    make, example = CASES[name]
    backbone = make().eval()
    model = MaskedModel(copy.deepcopy(backbone), example=example).eval()
    for size in (1, 2, 7):
        x = rows(example, torch.arange(size) % 2)
        assert_open_mask_computes(model, backbone, x)
    assert pickle.loads(pickle.dumps(model)).masked_features(x, torch.ones(model.n_units)).shape == (7, 4)


def test_an_example_of_one_sample_does_not_fix_the_batch_size():
    model = MaskedModel(two_tensors(), example=(LEFT[:1], RIGHT[:1])).eval()
    assert model.masked_features((LEFT, RIGHT), torch.ones(model.n_units)).shape == (2, 4)


@pytest.mark.parametrize("length", [3, 9])
def test_sequences_may_be_shorter_or_longer_than_the_example(length):
    net = words().eval()
    model = MaskedModel(net, example=TOKENS)
    ids, known = torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.long)
    ids[:, :2], known[:, :2] = TOKENS["input_ids"][:2, :2], 1
    expected = net(ids[:, :2], known[:, :2])["pooled"]
    assert torch.allclose(model.features({"input_ids": ids, "attention_mask": known}, 0), expected, atol=1e-6)


def mean_by_hand(s, x):
    """Divide a sum by the number of pixels."""
    h = torch.relu(s.k(x))
    return s.c(h.sum((2, 3)) / (h.shape[2] * h.shape[3]))


def one_path(s, x):
    """Compute small images in another way."""
    return mean_by_hand(s, x) if x.shape[2] < 9 else mean_by_hand(s, x[:, :, ::2, ::2]) + 1


def of_images(forward):
    return Net(forward, k=nn.Conv2d(1, 4, 3, padding=1), c=nn.Linear(4, 3)).eval()


def test_sizes_that_the_forward_reads_stay_free():
    backbone = of_images(mean_by_hand)
    model = MaskedModel(copy.deepcopy(backbone)).eval()  # the input size is found by trials
    for side in (8, 5):
        assert_open_mask_computes(model, backbone, torch.randn(2, 1, side, side))


def test_a_size_that_would_take_another_path_is_refused():
    model = MaskedModel(of_images(one_path), input_shape=(1, 8, 8)).eval()
    with pytest.raises(ModelError, match=r"read for .*input_shape=\(1, 20, 20\)"):
        model.masked_features(torch.randn(2, 1, 20, 20), torch.ones(model.n_units))


class CopiedSize(tiny.Net):
    """Copies the batch size, as the networks of GPM do."""

    def forward(self, x):
        n = copy.deepcopy(x.size(0))
        return super().forward(x).view(n, -1)


@pytest.mark.parametrize("shape", [None, (8,)])
def test_a_size_may_be_copied(shape):
    model = MaskedModel(CopiedSize(), input_shape=shape)
    assert model.graph.inputs.shape == (8,)
    assert model.features(torch.randn(5, 8), 0).shape == (5, 6)
    assert not hasattr(torch.SymInt, "__deepcopy__")  # torch itself is unchanged


# Modules declared frozen or task-owned --------------------------------------------------------------------------------


def branching(s, x):
    """Decide on values, and return a mapping."""
    y = s.layer(x)
    return {"large": y if float(y.detach().sum()) > 0 else -y, "small": (y.mean(1),)}


def declared(s, x):
    h = torch.relu(s.first(x))
    h = s.sized(h, x.shape[0]) + s.source()
    parts = s.branching(h)
    return s.last(torch.relu(parts["large"] * parts["small"][0].unsqueeze(1) + s.inner(h)))


@pytest.mark.parametrize("option", ["frozen", "task_owned"])
def test_declared_modules_may_read_sizes_or_nothing_and_contain_each_other(option):
    parts = {"sized": Net(lambda s, x, n: s.layer(x).reshape(n, -1), layer=nn.Linear(8, 8))}
    parts |= {"source": Net(lambda s: torch.tanh(s.bias), bias=nn.Parameter(torch.randn(8)))}
    parts |= {"branching": Net(branching, layer=nn.Linear(8, 8))}
    parts["inner"] = Net(lambda s, x: s.branching(x)["large"], branching=parts["branching"])
    net = Net(declared, first=nn.Linear(6, 8), last=nn.Linear(8, 5), **parts).eval()
    model = MaskedModel(net, input_shape=(6,), **{option: list(parts)})
    model.add_head(0, 2)
    x = torch.randn(7, 6)  # another batch size than in the trace
    expected = model.heads["0"](net(x))
    assert torch.allclose(model.eval()(x, 0), expected, atol=1e-6)
    if option == "task_owned":
        assert_sound(model, x, some_mask(model, 3).float())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_that_computes_its_weight_may_be_frozen_only():
    def net():
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 5))

    assert MaskedModel(net(), input_shape=(6,), frozen=["0"]).describe().tried
    with pytest.raises(ModelError, match=r"task_owned module '0' can't be copied"):
        MaskedModel(net(), input_shape=(6,), task_owned=["0"])


def counting(s, x):
    """Count calls in training mode, and drop units."""
    if s.training:
        s.calls += 1
    return s.drop(s.layer(x))


def test_a_trace_and_the_trial_change_no_buffer_no_mode_and_no_random_numbers():
    counts = Net(counting, layer=nn.Linear(8, 8), drop=nn.Dropout(0.5), calls=torch.zeros(()))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), counts, nn.Linear(8, 5))
    before, draws = state(net), torch.get_rng_state()
    model = MaskedModel(net, input_shape=(6,), task_owned=["3"])
    assert same_state(state(net), before)
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(module.training for module in (*net.modules(), model.backbone))


# Several heads --------------------------------------------------------------------------------------------------------


def many_heads(s, x, head="1"):
    """Run all heads, or the one that is asked for."""
    features = torch.relu(s.layer(x))
    return {name: one(features) for name, one in s.heads.items()} if s.all_run else s.heads[head](features)


@pytest.mark.parametrize("all_run", [True, False])
@pytest.mark.parametrize("classifier", ["heads", ("heads.1", "heads.0")])
def test_several_heads_are_left_out(classifier, all_run):
    heads, x = nn.ModuleDict({"0": nn.Linear(6, 2), "1": nn.Linear(6, 3)}), torch.randn(3, 8)
    net = Net(many_heads, layer=nn.Linear(8, 6), heads=heads, all_run=all_run, features=6)
    model = MaskedModel(net, classifier=classifier).eval()
    assert torch.allclose(model.features(x, 0), torch.relu(net.layer(x)))
    assert [name for name, _ in model.backbone.named_parameters()] == ["layer.weight", "layer.bias"]
    assert [type(head) for head in net.heads.values()] == [nn.Linear, nn.Linear]  # the user's network is unchanged
    assert validate(net, classifier=classifier) == []


@functools.cache
def masked(name: str) -> tuple[MaskedModel, torch.nn.Module]:
    """Return a masked backbone and a copy of the original, both in evaluation mode; no test may change them."""
    torch.manual_seed(0)
    backbone = BACKBONES[name].make()
    original = copy.deepcopy(backbone).eval()
    return MaskedModel(backbone, example=BACKBONES[name].batch(3), **BACKBONES[name].options).eval(), original


@pytest.mark.parametrize("name", BACKBONES)
def test_a_network_is_masked_soundly_and_every_layer_learns_its_mask(name):
    model, original = masked(name)
    assert_masks_are_sound(model, original, BACKBONES[name].batch, sizes=(1, 2, 7))
    names = {parameter for parameter, _ in model.backbone.named_parameters()}
    assert names == set(model.graph.factors) | model.graph.owned
    assert names == {parameter for parameter, _ in original.named_parameters()}
    assert sum(model.describe().shares.values()) == pytest.approx(1)

    gate = torch.rand(model.n_units, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert_gradients_are_finite(copy.deepcopy(model).train(), BACKBONES[name].batch(5), gate)
    assert [layer for layer, part in model.by_layer(gate.grad).items() if not part.any()] == []


def test_padding_and_other_sentences_of_the_batch_do_not_change_features():
    model, _ = masked("bert-sdpa")
    mask, x = some_mask(model, 3), tokens(7)
    together = features(model, x, mask)
    for row, sentence in enumerate(x):
        assert torch.allclose(features(model, sentence[None], mask)[0], together[row], atol=1e-6)
