"""Rates of the adjustment rules equal those of element loops; tasks change only entries that no locked task uses."""

from functools import partial

import pytest
import torch
from support.small_runs import logits_of, make, masked_mlp, permuted, use_of_entries
from support.strategies import Hears, learn
from support.strategy_state import bits, same_state, state, values

from avalanche_amnesia.evaluation import References
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import HAT, AdaHAT, AmnesiacHAT
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.update_rules import (
    AdaHATRule,
    Adjuster,
    AdjustmentRule,
    ConstantRule,
    RandomRule,
    TaskUse,
)


def model_with_masks(n_tasks: int = 3, seed: int = 0) -> MaskedModel:
    torch.manual_seed(seed)
    model = masked_mlp()
    for task in range(n_tasks):
        model.add_head(task, 2)
        model.start_task(task, torch.randn(model.n_units) - 0.3)
        model.finish_task()
    return model


def naive_held(model, name, rule, between=min) -> torch.Tensor:
    """Element by element, from the masks alone."""
    return use_of_entries(model, name, model.masks, between).apply_(lambda used_by: rule(used_by, len(model.masks)))


ABLATIONS = {"sum": lambda m, n: m, "flat": lambda m, n: n if m else 0, "number": lambda m, n: n + 1}


@pytest.mark.parametrize("importance", ABLATIONS)
@pytest.mark.parametrize(("no_reg", "n_tasks"), [(False, 0), (False, 3), (True, 1)])
def test_adahat_rates_equal_those_of_an_element_loop(importance, no_reg, n_tasks):
    if n_tasks == 0:
        model = masked_mlp()
        model.add_head(0, 2)
    else:
        model = model_with_masks(n_tasks)
    alpha, epsilon, kappa = 0.05, 0.1, 0.37
    rule = AdaHATRule(alpha, epsilon, importance=importance, sparsity=not no_reg)
    rate = alpha / (epsilon + (0 if no_reg else kappa))

    def expected(used_by, n_tasks):
        return 1 - rate / (ABLATIONS[importance](used_by, n_tasks) + rate)

    use, shapes = TaskUse(model), {name: p.shape for name, p in model.backbone.named_parameters()}
    for name, shape in shapes.items():
        held = rule.protected_share(use, name, kappa)
        wanted = naive_held(model, name, expected) if n_tasks else torch.full(shape, expected(0, 0)).double()
        assert torch.allclose(held.double(), wanted, atol=1e-6), name
        free = held[use.covered[name] == 0]
        assert bool((free > 0).all() if importance == "number" else (free == 0).all())


def test_max_protects_weights_of_which_either_end_is_in_use():
    model, rate, kappa = model_with_masks(), 0.05 / (0.1 + 0.37), 0.37
    use, more = TaskUse(model), 0
    for rule, expected in (
        (AdjustmentRule(between="max"), lambda m, n: float(m > 0)),
        (AdaHATRule(0.05, between="max"), lambda m, n: m / (m + rate)),
    ):
        for name, _ in model.backbone.named_parameters():
            held, wanted = rule.protected_share(use, name, kappa).double(), naive_held(model, name, expected, max)
            assert torch.allclose(held, wanted, atol=1e-6), name
            assert bool((held[use.covered[name] > 0] > 0).all())
            more += int((held[use.covered[name] == 0] > 0).sum())
    assert more > 0


def test_hat_constant_and_random_rates_equal_those_of_an_element_loop():
    model = model_with_masks()
    use, random_rule = TaskUse(model), RandomRule()
    random_rule.start(0, 1)
    for name, _ in model.backbone.named_parameters():
        covered = naive_held(model, name, lambda importance, _: float(importance > 0)).float()
        # The min of the summative masks can be above 0 where no one task uses both ends.
        assert torch.equal(AdjustmentRule().protected_share(use, name, 0.0), covered)
        assert torch.allclose(ConstantRule(0.25).protected_share(use, name, 0.0), 0.75 * covered)
        first, second = (random_rule.protected_share(use, name, 0.0) for _ in range(2))
        assert bool(((first >= 0) & (first <= covered)).all())
        assert not torch.equal(first, second)
        if first.numel() > 500:
            assert abs(float(first[covered > 0].mean()) - 0.5) < 0.06


def adjuster(rule, model, **optimizer):
    rule.start(0, 9)
    parameters, layers = dict(model.backbone.named_parameters()), list(model.graph.layers)
    places = {"before": values(model.backbone), "layer_of": lambda name: layers.index(name.rsplit(".", 1)[0])}
    return Adjuster(rule, TaskUse(model), parameters=parameters, **places, **optimizer)


@pytest.mark.parametrize(
    "rule",
    [AdjustmentRule(), ConstantRule(1.0), AdaHATRule(0.05, 0.1), RandomRule()],
    ids=["hat", "constant", "adahat", "random"],
)
def test_update_space_is_the_damped_update(rule):
    model, sparsity = model_with_masks(), [0.2, 0.6]
    adjust = adjuster(rule, model)
    frozen_before = values(model.backbone)
    for _ in range(3):
        before = values(model.backbone)
        adjust.before_step(sparsity if adjust.needs_sparsity else [])
        moved = {name: p + torch.randn_like(p) for name, p in model.backbone.named_parameters()}
        with torch.no_grad():
            for name, p in model.backbone.named_parameters():
                p.copy_(moved[name])
        adjust.after_step()
        held = dict(zip(adjust.names, adjust._shares, strict=True))
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


def stepped(rule, model, **optimizer):
    """Return the parameters after three steps of plain SGD, and whether gradients were scaled."""
    adjust = adjuster(rule, model, **optimizer)
    generator = torch.Generator().manual_seed(1)
    for sparsity in ([0.2, 0.6], [0.9, 0.0], [0.4, 0.4]):
        for p in model.backbone.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        adjust.before_step(sparsity)
        torch.optim.SGD(model.backbone.parameters(), lr=0.1).step()
        adjust.after_step()
    return state(model), adjust.on_gradients


@pytest.mark.parametrize(
    "make", [lambda: AdaHATRule(0.05, 0.1), lambda: ConstantRule(0.3), RandomRule], ids=["adahat", "constant", "random"]
)
def test_scaled_gradients_of_a_linear_step_give_the_same_parameters(make):
    first, second = model_with_masks(), model_with_masks()
    slow, by_gradients = stepped(make(), first)
    fast, scaled = stepped(make(), second, linear=True)
    assert (by_gradients, scaled) == (False, True)
    assert all(torch.allclose(slow[key], fast[key], atol=1e-6) for key in slow)
    assert not same_state(slow, state(model_with_masks()))


def test_gradient_space_scales_gradients_and_leaves_weights():
    model = model_with_masks()
    adjust = adjuster(AdaHATRule(0.05, 0.1, space="gradient"), model)
    gradients = {}
    for name, p in model.backbone.named_parameters():
        p.grad = torch.randn_like(p)
        gradients[name] = p.grad.clone()
    before = state(model)
    adjust.before_step([0.2, 0.6])
    adjust.after_step()
    assert same_state(before, state(model))
    for index, (name, p) in enumerate(model.backbone.named_parameters()):
        held = adjust.rule.protected_share(adjust.use, name, [0.2, 0.2, 0.6, 0.6][index])
        assert torch.allclose(p.grad, gradients[name] * (1 - held))


@pytest.mark.parametrize(
    ("adjustment", "optimizer"), [("hat", "adam decay"), ("random", "momentum"), ("adahat", "adam decay")]
)
def test_a_task_changes_only_entries_of_its_mask(adjustment, optimizer):
    rule = AdaHATRule(alpha=0.1) if adjustment == "adahat" else adjustment
    strategy, benchmark = make(HAT, optimizer=optimizer, adjustment=rule), permuted()
    initial = values(strategy.model.backbone)
    owned = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in initial.items()}
    for task, experience in enumerate(benchmark.train_stream):
        before = values(strategy.model.backbone)
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


@pytest.mark.parametrize(("kind", "locked"), [(HAT, [0]), (HAT, [2, 1, 3]), (AmnesiacHAT, [1]), (HAT, [])])
def test_only_locked_tasks_keep_the_bits_of_their_logits(kind, locked):
    rule, benchmark = AdjustmentRule(locked=iter(locked)), permuted(4)
    strategy = make(kind, optimizer="adam decay", adjustment=rule)
    kept, drifted = {}, set()
    for task, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        now = logits_of(strategy, benchmark, range(task + 1))
        drifted |= {earlier for earlier in kept if not torch.equal(now[earlier], kept[earlier])}
        kept = now
    assert drifted == {0, 1, 2} - set(locked)


@pytest.mark.parametrize("locked", [{0, 2}, set(), None])
def test_importance_and_capacity_count_only_locked_tasks(locked):
    net = partial(MLP, 64, hidden=(12,), features=10)
    strategy = learn(make(AdaHAT, net=net, adjustment=AdaHATRule(locked=locked)), permuted(4), 3)
    model = strategy.model
    counted = [task for task in range(3) if locked is None or task in locked]
    use = TaskUse(model, locked)
    assert use.n_tasks == len(counted)
    units = torch.stack([torch.zeros(model.n_units).bool(), *map(model.binary_mask, counted)]).any(0)
    assert torch.equal(use.in_use, units)
    naive = {name: use_of_entries(model, name, counted) for name in use.importance}
    for name, expected in naive.items():
        assert torch.equal(use.importance[name].double(), expected)
    n = sum(expected.numel() for expected in naive.values())
    taken = sum(float((e > 0).sum()) for e in naive.values())  # both ends in use, not necessarily by the same task
    adahat = sum(float((e / (e + 0.1)).sum()) for e in naive.values())
    for rule, protected in (
        (AdaHATRule(0.01, 0.1, locked=locked), adahat),
        (AdjustmentRule(locked=locked), taken),
        (RandomRule(locked=locked), taken / 2),
    ):
        find_plugin(strategy, HATPlugin).rule = rule
        assert network_capacity(strategy) == pytest.approx(1 - protected / n, abs=1e-6)
    if not counted:
        assert network_capacity(strategy) == 1.0


def test_the_sparsity_price_counts_only_units_of_locked_tasks():
    seen = []

    def watch(made):
        now = find_plugin(made, HATPlugin).in_training
        price = now.regulariser.gradient(now.gate)
        locked = [task for task in made.model.masks if task == 1]
        in_use = torch.stack([torch.zeros(len(price)).bool(), *map(made.model.binary_mask, locked)]).any(0)
        assert torch.equal(price == 0, in_use)
        seen.append((made.model.current_task, bool(in_use.any())))

    plugins = [Hears(before_update=watch)]
    learn(make(adjustment=AdjustmentRule(locked=[1]), plugins=plugins, train_epochs=1), permuted(3))
    assert {task for task, _ in seen} == {0, 1, 2}
    assert all(any_use == (task == 2) for task, any_use in seen)


# Unlearning where tasks are not locked ------------------------------------------------------------------------------

STREAM = permuted(4, n_train=60)


amnesiac = partial(make, AmnesiacHAT, optimizer="adam", train_epochs=1)


def test_unlearning_restores_overwritten_values_exactly():
    strategy = learn(amnesiac(adjustment=AdjustmentRule(locked=[0])), STREAM.train_stream[:2])
    before = logits_of(strategy, STREAM, [0, 1])
    strategy.train(STREAM.train_stream[2])
    overwritten = logits_of(strategy, STREAM, [0, 1])
    assert torch.equal(overwritten[0], before[0])
    assert not torch.equal(overwritten[1], before[1])
    record = strategy.unlearn([2])
    assert record.claim == "exact"
    assert record.affected == (1,)  # learned before the task that went, and not locked against it
    again = logits_of(strategy, STREAM, [0, 1])
    assert all(torch.equal(again[task], before[task]) for task in (0, 1))
    refs = References(lambda **kw: amnesiac(adjustment=AdjustmentRule(locked=[0]), **kw), STREAM)
    assert bits(strategy.model) == bits(refs.reference([0, 1]))
    strategy.train(STREAM.train_stream[3])  # and on
    assert bits(strategy.model) == bits(refs.reference([0, 1, 3]))
