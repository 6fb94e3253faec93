"""The formulas against naive float64 twins, autograd, and what a task may change."""

import math
from itertools import pairwise

import pytest
import torch
from avalanche.core import SupervisedPlugin
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_runs import logits, make, masked_mlp, permuted, same_state, state, train_all
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import HAT, AdaHAT
from avalanche_amnesia.training.hat_formulas import (
    SparsityRegulariser,
    compensate_,
    embedding_gradient,
    initial_embedding,
    mask_scale,
)
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.update_rules import (
    AdaHATRule,
    Adjuster,
    AdjustmentRule,
    ConstantRule,
    RandomRule,
    TaskUse,
)


def test_linear_scale():
    scales = [mask_scale(b, 5, 400) for b in range(5)]
    assert scales[0] == 1 / 400
    assert scales[-1] == 400
    assert [b - a for a, b in pairwise(scales)] == pytest.approx([(400 - 1 / 400) / 4] * 4)
    assert mask_scale(0, 1, 400) == 400


def test_cosine_scale():
    scales = [mask_scale(b, 5, 400, "cosine") for b in range(5)]
    assert scales == pytest.approx([400, 200, 1 / 400, 200, 400])
    assert mask_scale(0, 1, 400, "cosine") == 400


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
    compensate_(q, e, scale, 400.0, clamp)
    assert torch.allclose(q.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-20)
    assert torch.equal(e, kept)


def test_compensation_of_the_gate_is_the_gradient_at_full_scale_free_of_annealing():
    e = torch.linspace(-3, 3, 13, dtype=torch.float64)
    for scale in (0.01, 1.0, 7.0):
        gate = torch.sigmoid(scale * e)
        q = embedding_gradient(torch.ones_like(e), gate, scale)
        compensate_(q, e, scale, 400.0, 50.0)
        assert torch.allclose(q, 400 * torch.sigmoid(e) * (1 - torch.sigmoid(e)))  # s_max · σ'(e), FINDINGS A


def test_a_saturated_gate_passes_no_gradient_in_float32():
    e = torch.tensor([0.1, 1.0, 6.0])
    q = embedding_gradient(torch.ones(3), torch.sigmoid(400 * e), 400.0)
    compensate_(q, e, 400.0, 400.0, 50.0)
    assert q.tolist() == [0.0, 0.0, 0.0]


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


@settings(max_examples=30, deadline=None)
@given(in_use=masks, gate=st.lists(st.floats(0, 1, width=32), min_size=9, max_size=9))
def test_layer_sparsity(in_use, gate):
    kappa = SparsityRegulariser(1, "original", torch.tensor(in_use), SIZES, 1).layer_sparsity(torch.tensor(gate))
    start = 0
    for layer, size in enumerate(SIZES):
        free = [i for i in range(start, start + size) if not in_use[i]]
        expected = sum(gate[i] for i in free) / len(free) if free else 0.0
        assert float(kappa[layer]) == pytest.approx(expected, abs=1e-6)
        start += size


@pytest.mark.parametrize("mode", ["original", "cross", "quota"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_embedding_gradient_by_hand_equals_autograd(mode, forwards):
    torch.manual_seed(0)
    model = masked_mlp()
    model.add_head(0, 10)
    e = torch.randn(model.n_units) * 0.5
    in_use = torch.rand(model.n_units) < 0.4
    model.start_task(0, e)
    batch = permuted(1).train_stream[0].tensors[0][:32], permuted(1).train_stream[0].tensors[1][:32]
    scale, sizes = 2.5, [layer.units for layer in model.graph.layers.values()]
    regulariser = SparsityRegulariser(0.75, mode, in_use, sizes, 4)

    gate = model.open_gate(scale)
    model.train()
    for _ in range(forwards):  # gradients of every forward before the step count
        nn.functional.cross_entropy(model(batch[0], 0), batch[1]).backward()
    by_hand = embedding_gradient(model.gate_gradient() + regulariser.gradient(gate), gate, scale)

    leaf = e.clone().requires_grad_()
    soft = torch.sigmoid(scale * leaf)
    loss = forwards * nn.functional.cross_entropy(model.head(0)(model.masked_features(batch[0], soft)), batch[1])
    (loss + regulariser(soft)).backward()
    assert torch.allclose(by_hand, leaf.grad, atol=1e-6, rtol=1e-4)
    assert float(by_hand.abs().max()) > 1e-4


def test_the_gate_carries_gradient_through_a_mixed_mini_batch():
    torch.manual_seed(0)
    model = masked_mlp()
    for task in (0, 1):
        model.add_head(task, 10)
    model.start_task(0, torch.randn(model.n_units))
    model.finish_task()
    e = torch.randn(model.n_units)
    model.start_task(1, e)
    x, y = permuted(1).train_stream[0].tensors
    x, y, t = x[:32], y[:32], torch.arange(32) % 2
    gate = model.open_gate(1.5)
    nn.functional.cross_entropy(model.train()(x, t), y).backward()
    leaf = e.clone().requires_grad_()
    own = model.head(1)(model.masked_features(x[t == 1], torch.sigmoid(1.5 * leaf)))
    (nn.functional.cross_entropy(own, y[t == 1]) / 2).backward()
    assert torch.allclose(embedding_gradient(model.gate_gradient(), gate, 1.5), leaf.grad, atol=1e-6, rtol=1e-4)


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


# Adjustment rates ---------------------------------------------------------------------------------------------------


def model_with_masks(n_tasks: int = 3, seed: int = 0) -> MaskedModel:
    torch.manual_seed(seed)
    model = masked_mlp()
    for task in range(n_tasks):
        model.add_head(task, 2)
        model.start_task(task, torch.randn(model.n_units) - 0.3)
        model.finish_task()
    return model


def naive_held(model, name, rule) -> torch.Tensor:
    """Element by element, from the masks alone."""
    layers = list(model.graph.layers)
    layer, kind = name.rsplit(".", 1)
    index, masks = layers.index(layer), list(model.masks.values())
    parameter = dict(model.backbone.named_parameters())[name]
    result = torch.zeros(parameter.shape, dtype=torch.float64)
    counts = {n: sum(m[n].double() for m in masks).tolist() for n in layers}
    for i in range(parameter.shape[0]):
        for j in range(parameter.shape[1] if kind == "weight" else 1):
            of_unit = counts[layer][i]
            of_source = len(masks) if index == 0 or kind == "bias" else counts[layers[index - 1]][j]
            result[(i, j) if kind == "weight" else (i,)] = rule(min(of_unit, of_source), len(masks))
    return result


@pytest.mark.parametrize("no_sum", [False, True])
@pytest.mark.parametrize("no_reg", [False, True])
def test_adahat_rate_against_an_element_loop(no_sum, no_reg):
    model, alpha, epsilon, kappa = model_with_masks(), 0.05, 0.1, 0.37
    rule = AdaHATRule(alpha, epsilon, importance=not no_sum, sparsity=not no_reg)
    rate = alpha / (epsilon + (0 if no_reg else kappa))

    def expected(importance, n_tasks):
        if no_sum:
            importance = n_tasks if importance else 0
        return 1 - rate / (importance + rate)

    use = TaskUse(model)
    for name, _ in model.backbone.named_parameters():
        held = rule.held(use, name, kappa)
        assert torch.allclose(held.double(), naive_held(model, name, expected), atol=1e-6), name
        assert bool((held[use.covered[name] == 0] == 0).all())


def test_hat_constant_and_random_rates():
    model = model_with_masks()
    use, random_rule = TaskUse(model), RandomRule()
    random_rule.start(0, 1)
    for name, _ in model.backbone.named_parameters():
        covered = naive_held(model, name, lambda importance, _: float(importance > 0)).float()
        # The min of the summative masks can be above 0 where no one task uses both ends.
        assert torch.equal(AdjustmentRule().held(use, name, 0.0), covered)
        assert torch.allclose(ConstantRule(0.25).held(use, name, 0.0), 0.75 * covered)
        first, second = (random_rule.held(use, name, 0.0) for _ in range(2))
        assert bool(((first >= 0) & (first <= covered)).all())
        assert not torch.equal(first, second)
        if first.numel() > 500:
            assert abs(float(first[covered > 0].mean()) - 0.5) < 0.06


def test_capacity_against_the_mean_of_the_element_loop():
    model = model_with_masks()
    n = sum(p.numel() for p in model.backbone.parameters())

    def mean_rate(rule):
        return (
            sum(float((1 - naive_held(model, name, rule)).sum()) for name, _ in model.backbone.named_parameters()) / n
        )

    use, rate = TaskUse(model), 0.05 / 0.1
    assert AdjustmentRule().capacity(use) == pytest.approx(mean_rate(lambda m, _: float(m > 0)), abs=1e-6)
    assert AdaHATRule(0.05, 0.1).capacity(use) == pytest.approx(mean_rate(lambda m, _: m / (m + rate)), abs=1e-6)
    assert RandomRule().capacity(use) == pytest.approx(mean_rate(lambda m, _: float(m > 0) / 2), abs=1e-6)
    empty = TaskUse(masked_mlp())
    assert [rule.capacity(empty) for rule in (AdjustmentRule(), AdaHATRule(0.05, 0.1), ConstantRule(0))] == [1, 1, 1]


def adjuster(rule, space, model):
    rule.start(0, 9)
    parameters = dict(model.backbone.named_parameters())
    layers = list(model.graph.layers)
    return Adjuster(
        rule,
        space,
        TaskUse(model),
        parameters=parameters,
        before={name: p.detach().clone() for name, p in parameters.items()},
        layer_of=lambda name: layers.index(name.rsplit(".", 1)[0]),
    )


@pytest.mark.parametrize(
    "rule",
    [AdjustmentRule(), ConstantRule(0.3), ConstantRule(0.0), ConstantRule(1.0), AdaHATRule(0.05, 0.1), RandomRule()],
    ids=["hat", "constant .3", "constant 0", "constant 1", "adahat", "random"],
)
def test_update_space_is_the_damped_update(rule):
    model, sparsity = model_with_masks(), [0.2, 0.6]
    adjust = adjuster(rule, "update", model)
    frozen_before = {name: p.detach().clone() for name, p in model.backbone.named_parameters()}
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in model.backbone.named_parameters()}
        adjust.before_step(sparsity if adjust.needs_sparsity else [])
        moved = {name: p + torch.randn_like(p) for name, p in model.backbone.named_parameters()}
        with torch.no_grad():
            for name, p in model.backbone.named_parameters():
                p.copy_(moved[name])
        adjust.after_step()
        held = dict(zip(adjust.names, adjust._held, strict=True))
        for name, p in model.backbone.named_parameters():
            rate = 1 - held[name]
            assert torch.allclose(p, before[name] + rate * (moved[name] - before[name]), atol=1e-5)
            assert torch.equal(p[rate == 1], moved[name][rate == 1])
            assert torch.equal(p[rate == 0], before[name][rate == 0])
            if isinstance(rule, ConstantRule) and rule.alpha == 1:
                assert torch.equal(p, moved[name])
            if type(rule) is AdjustmentRule:
                covered = adjust.use.covered[name] == 1
                assert torch.equal(p[covered], frozen_before[name][covered])


def test_gradient_space_scales_gradients_and_leaves_weights():
    model = model_with_masks()
    adjust = adjuster(AdaHATRule(0.05, 0.1), "gradient", model)
    gradients = {}
    for name, p in model.backbone.named_parameters():
        p.grad = torch.randn_like(p)
        gradients[name] = p.grad.clone()
    before = state(model)
    adjust.before_step([0.2, 0.6])
    adjust.after_step()
    assert same_state(before, state(model))
    for index, (name, p) in enumerate(model.backbone.named_parameters()):
        held = adjust.rule.held(adjust.use, name, [0.2, 0.2, 0.6, 0.6][index])
        assert torch.allclose(p.grad, gradients[name] * (1 - held))


# Whole tasks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjustment", ["hat", "random", "adahat"])
@pytest.mark.parametrize("optimizer", ["adam decay", "momentum"])
def test_commit(adjustment, optimizer):
    kind, options = (AdaHAT, {"alpha": 0.1}) if adjustment == "adahat" else (HAT, {"adjustment": adjustment})
    strategy, benchmark = make(kind, optimizer=optimizer, **options), permuted()
    initial = {name: p.detach().clone() for name, p in strategy.model.backbone.named_parameters()}
    owned = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in initial.items()}
    for task, experience in enumerate(benchmark.train_stream):
        before = {name: p.detach().clone() for name, p in strategy.model.backbone.named_parameters()}
        strategy.train(experience)
        use = strategy.model.graph.parameter_use(strategy.model.masks[task])
        for name, p in strategy.model.backbone.named_parameters():
            inside = (use[name] > 0).expand_as(p)
            assert torch.equal(p[~inside].view(torch.int32), before[name][~inside].view(torch.int32))
            frozen = owned[name] & inside
            if adjustment == "hat":
                assert torch.equal(p[frozen].view(torch.int32), before[name][frozen].view(torch.int32))
            elif frozen.any():
                assert not torch.equal(p[frozen], before[name][frozen])
            owned[name] |= inside
    for name, p in strategy.model.backbone.named_parameters():
        assert torch.equal(p[~owned[name]].view(torch.int32), initial[name][~owned[name]].view(torch.int32))
        assert bool((~owned[name]).any())


def test_constant_one_is_no_protection_at_all():
    """Every step of the second task moves parameters in use as if there were no first task."""
    strategy, benchmark = make(adjustment="constant", alpha=1.0, optimizer="adam"), permuted()
    train_all(strategy, benchmark, 1)
    before = {name: p.detach().clone() for name, p in strategy.model.backbone.named_parameters()}
    first = strategy.model.graph.parameter_use(strategy.model.masks[0])
    strategy.train(benchmark.train_stream[1])
    both = strategy.model.graph.parameter_use(strategy.model.masks[1])
    for name, p in strategy.model.backbone.named_parameters():
        shared = ((first[name] > 0) & (both[name] > 0)).expand_as(p)
        assert float((p != before[name])[shared].float().mean()) > 0.5


def test_adahat_with_a_tiny_alpha_is_hat_and_alpha_matters():
    benchmark = permuted()
    hat = train_all(make(HAT), benchmark)
    tiny, large = (train_all(make(AdaHAT, alpha=alpha), benchmark) for alpha in (1e-30, 1.0))
    expected = logits(hat, benchmark, range(3))
    assert all(torch.equal(logits(tiny, benchmark, range(3))[t], expected[t]) for t in range(3))
    assert not torch.equal(logits(large, benchmark, range(3))[0], expected[0])


@pytest.mark.parametrize("options", [{"no_sum": True}, {"no_reg": True}, {"adjust": "gradient"}, {"alpha": 10.0}])
def test_the_first_task_meets_no_adjustment(options):
    benchmark = permuted()
    a, b = train_all(make(AdaHAT, **options), benchmark, 1), train_all(make(HAT), benchmark, 1)
    assert same_state(state(a.model), state(b.model))


@pytest.mark.parametrize("min_units", [1, 3, 1000])
def test_no_layer_falls_below_its_minimum_of_open_units(min_units):
    smallest = []

    class Watch(SupervisedPlugin):
        def after_training_iteration(self, strategy, **kwargs):
            open_units = strategy.model.by_layer(strategy.model.binary_mask(strategy.model.current_task))
            smallest.append(min(int(mask.sum()) for mask in open_units.values()))

    strategy = make(sparsity_weight=50, min_units=min_units, embedding_lr=1.0, train_epochs=4, plugins=[Watch()])
    train_all(strategy, permuted())
    for masks in strategy.model.masks.values():
        for mask in masks.values():
            assert int(mask.sum()) >= min(min_units, len(mask))
    assert min(smallest) >= min(min_units, 30)
    if min_units == 1:
        assert min(smallest) < 30  # the price is strong enough to be felt


def test_a_stronger_price_opens_fewer_units():
    sizes = []
    for weight in (0.0, 3.0):
        strategy = train_all(make(sparsity_weight=weight, train_epochs=4), permuted(), 1)
        sizes.append(int(strategy.model.cumulative_mask().sum()))
    assert sizes[1] < sizes[0]


def test_embeddings_stay_within_their_bounds():
    strategy = train_all(make(embedding_lr=5.0, embedding_clamp=2.0), permuted(), 2)
    assert all(float(strategy.model.task_embedding(task).abs().max()) <= 2 for task in (0, 1))
    assert find_plugin(strategy, HATPlugin).snapshot is None
