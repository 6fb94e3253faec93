"""HAT's formulas against naive float64 twins and autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_runs import make, masked_mlp, permuted
from support.strategies import Hears, learn
from torch import nn

from avalanche_amnesia import MLP, HardAttention, MaskedModel
from avalanche_amnesia.training.hat_formulas import (
    SparsityRegulariser,
    embedding_gradient,
    initial_embedding,
    mask_scale,
    rescale_embedding_gradient_,
)


def test_scales_of_an_epoch():
    step = (400 - 1 / 400) / 4
    assert [mask_scale(b, 5, 400) for b in range(5)] == pytest.approx([1 / 400 + b * step for b in range(5)])
    assert [mask_scale(b, 5, 400, "cosine") for b in range(5)] == pytest.approx([400, 200, 1 / 400, 200, 400])
    assert mask_scale(0, 1, 400) == mask_scale(0, 1, 400, "cosine") == 400


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(1 / 400, 400),
    entries=st.lists(st.tuples(st.floats(-6, 6, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=8),
    clamp=st.sampled_from([50.0, 5.0]),
)
def test_compensation_equals_the_published_formula(scale, entries, clamp):
    e, q = (torch.tensor(column) for column in zip(*entries, strict=True))
    expected = []
    for value, gradient in zip(e.double().tolist(), q.double().tolist(), strict=True):
        argument = min(max(scale * value, -clamp), clamp)
        expected.append(400 * (math.cosh(argument) + 1) / (scale * (math.cosh(value) + 1)) * gradient)
    kept = e.clone()
    rescale_embedding_gradient_(q, e, scale, 400.0, clamp)
    assert torch.allclose(q.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-20)
    assert torch.equal(e, kept)


SIZES = (3, 4, 2)


def naive_regulariser(mode: str, weight: float, gate, in_use, n_tasks: int):
    a, use = gate.tolist(), [float(u) for u in in_use]
    free = [1 - u for u in use]
    original = sum(x * f for x, f in zip(a, free, strict=True)) / max(sum(free), 1)
    if mode == "original":
        return weight * original
    if mode == "cross":
        if not sum(use):
            return weight * original
        return weight * (original + 1 - sum(x * u for x, u in zip(a, use, strict=True)) / sum(use)) / 2
    total, start = 0.0, 0
    for size in SIZES:
        rows = range(start, start + size)
        share = sum(a[i] * free[i] for i in rows) / max(sum(free[i] for i in rows), 1)
        total += max(share - 1 / n_tasks, 0)
        start += size
    return weight * total


masks = st.lists(st.booleans(), min_size=9, max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["original", "cross", "quota"]),
    in_use=masks,
    gate=st.lists(st.floats(0, 1, width=32), min_size=9, max_size=9),
    n_tasks=st.integers(1, 5),
)
def test_regulariser_and_its_gradient(mode, in_use, gate, n_tasks):
    use, a = torch.tensor(in_use), torch.tensor(gate)
    regulariser = SparsityRegulariser(0.75, mode, use, SIZES, n_tasks)
    assert float(regulariser(a)) == pytest.approx(naive_regulariser(mode, 0.75, a, use, n_tasks), abs=1e-6)
    by_autograd = a.clone().requires_grad_()
    value = regulariser(by_autograd)
    if value.requires_grad:
        value.backward()
    expected = torch.zeros(9) if by_autograd.grad is None else by_autograd.grad
    start, at_a_kink = 0, False
    for size in SIZES:
        share = float((a * ~use)[start : start + size].sum()) / max(int((~use)[start : start + size].sum()), 1)
        at_a_kink |= abs(share - 1 / n_tasks) < 1e-6
        start += size
    if mode != "quota" or not at_a_kink:
        assert torch.allclose(regulariser.gradient(a), expected, atol=1e-7)


@pytest.mark.parametrize("mode", ["original", "cross", "quota"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_embedding_gradient_by_hand_equals_autograd(mode, forwards):
    model = masked_mlp()
    model.add_head(0, 10)
    e = torch.randn(model.n_units) * 0.5
    in_use = torch.rand(model.n_units) < 0.4
    model.start_task(0, e)
    batch = permuted(1).train_stream[0].tensors[0][:32], permuted(1).train_stream[0].tensors[1][:32]
    scale, sizes = 2.5, [layer.units for layer in model.graph.layers.values()]
    regulariser = SparsityRegulariser(0.75, mode, in_use, sizes, 4)

    gate = model.gate.update(scale)
    model.train()
    for _ in range(forwards):  # gradients of every forward before the step count
        nn.functional.cross_entropy(model(batch[0], 0), batch[1]).backward()
    by_hand = embedding_gradient(model.gate.gradient() + regulariser.gradient(gate), gate, scale)

    leaf = e.clone().requires_grad_()
    soft = torch.sigmoid(scale * leaf)
    loss = forwards * nn.functional.cross_entropy(model.head(0)(model.masked_features(batch[0], soft)), batch[1])
    (loss + regulariser(soft)).backward()
    assert torch.allclose(by_hand, leaf.grad, atol=1e-6, rtol=1e-4)
    assert float(by_hand.abs().max()) > 1e-4


def test_the_gate_carries_gradient_through_a_mixed_mini_batch():
    model = masked_mlp()
    for task in (0, 1):
        model.add_head(task, 10)
    model.start_task(0, torch.randn(model.n_units))
    model.finish_task()
    e = torch.randn(model.n_units)
    model.start_task(1, e)
    x, y = permuted(1).train_stream[0].tensors
    x, y, t = x[:32], y[:32], torch.arange(32) % 2
    gate = model.gate.update(1.5)
    nn.functional.cross_entropy(model.train()(x, t), y).backward()
    leaf = e.clone().requires_grad_()
    own = model.head(1)(model.masked_features(x[t == 1], torch.sigmoid(1.5 * leaf)))
    (nn.functional.cross_entropy(own, y[t == 1]) / 2).backward()
    assert torch.allclose(embedding_gradient(model.gate.gradient(), gate, 1.5), leaf.grad, atol=1e-6, rtol=1e-4)


def test_initial_embeddings():
    def draw(kind, last=None, seed=0):
        return initial_embedding(kind, 4000, torch.Generator().manual_seed(seed), last, n_tasks=5)

    for kind, low, high in (("uniform", -1, 1), ("positive", 0, 1), ("negative", -1, 0)):
        e = draw(kind)
        assert low <= float(e.min()) < low + 0.01
        assert high - 0.01 < float(e.max()) <= high
    normal = draw("normal")
    assert abs(float(normal.mean())) < 0.05
    assert abs(float(normal.std()) - 1) < 0.05
    assert torch.equal(draw("ones"), torch.ones(4000))
    assert torch.equal(draw("last"), normal)
    last = torch.randn(4000)
    assert torch.equal(draw("last", last), last)
    assert draw("last", last) is not last
    assert torch.equal(draw("normal"), normal)
    assert not torch.equal(draw("normal", seed=1), normal)


@pytest.mark.parametrize(("n_tasks", "low", "high"), [(1, 1, 1), (4, 0.19, 0.31)])
def test_a_strategy_knows_how_many_tasks_its_stream_has(n_tasks, low, high):
    shares = []
    watch = Hears(before_training_exp=lambda made: shares.append(float((made.model.embedding > 0).float().mean())))
    options = {"train_epochs": 1, "train_mb_size": 99, "plugins": [watch]}
    model = MaskedModel(MLP(64, hidden=(900,), features=100))
    learn(make(model=model, masks=HardAttention(embedding_init="sparse"), **options), permuted(n_tasks, n_train=20))
    assert len(shares) == n_tasks
    assert all(low <= share <= high for share in shares)
