"""HAT-CL's ideas: embeddings by share, a quota per layer, locking only the tasks that are named."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.small_runs import logits_of, make, permuted
from support.strategies import Hears, learn
from support.strategy_state import bits, same_state, state, values

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.evaluation import References, network_capacity
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import EVEN_BUDGET, HAT, AdaHAT, AmnesiacHAT, HardAttention
from avalanche_amnesia.training.hat_formulas import SparsityRegulariser, initial_embedding
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import HATPlugin, UnlearningPlugin
from avalanche_amnesia.training.update_rules import AdaHATRule, AdjustmentRule, TaskUse

# Sparse initialisation ----------------------------------------------------------------------------------------------


def draw(n_units: int, n_tasks: int, seed: int = 0, kind="sparse"):
    return initial_embedding(kind, n_units, torch.Generator().manual_seed(seed), n_tasks=n_tasks)


@pytest.mark.parametrize("n_tasks", [1, 2, 3, 10, 50])
def test_a_unit_begins_open_with_probability_one_over_the_tasks(n_tasks):
    n = 40_000
    expected, deviation = n / n_tasks, math.sqrt(n * (1 / n_tasks) * (1 - 1 / n_tasks))
    for seed in range(3):
        assert abs(int((draw(n, n_tasks, seed) > 0).sum()) - expected) <= 4 * deviation  # all of them for one task


def test_a_sparse_embedding_has_the_size_of_a_normal_one_and_its_generator_decides():
    e = draw(40_000, 10)
    assert abs(float(e.abs().mean()) - math.sqrt(2 / math.pi)) < 0.02
    assert abs(float(e.square().mean()) - 1) < 0.03
    opened, closed = e[e > 0].mean(), e[e < 0].mean()
    assert abs(float(opened + closed)) < 0.05  # an open unit is as near to closing as a closed one to opening
    assert torch.equal(e, draw(40_000, 10))
    assert not torch.equal(e, draw(40_000, 10, seed=1))


@pytest.mark.parametrize("kind", [HAT, AdaHAT, AmnesiacHAT])
def test_every_strategy_knows_how_many_tasks_its_stream_has(kind):
    for n_tasks, low, high in ((1, 1, 1), (4, 0.19, 0.31)):
        model = MaskedModel(MLP(64, hidden=(900,), features=100))
        shares = []

        def watch(made, shares=shares):
            shares.append(float((made.model.embedding > 0).float().mean()))

        options = {"train_epochs": 1, "train_mb_size": 99, "plugins": [Hears(before_training_exp=watch)]}
        strategy = make(kind, model=model, masks=HardAttention(embedding_init="sparse"), **options)
        learn(strategy, PermutedDigits(n_tasks, n_train=20, n_test=20))
        assert len(shares) == n_tasks
        assert all(low <= share <= high for share in shares)


# Quota --------------------------------------------------------------------------------------------------------------

SIZES = (3, 5, 1)
bits_of_units = st.lists(st.booleans(), min_size=9, max_size=9)


@settings(max_examples=150, deadline=None)
@given(
    in_use=bits_of_units,
    gate=st.lists(st.floats(0, 1, width=32), min_size=9, max_size=9),
    n_tasks=st.sampled_from([1, 2, 3, 5, 20, math.inf]),
)
def test_the_quota_is_a_loop_over_the_layers_and_so_is_its_gradient(in_use, gate, n_tasks):
    a = torch.tensor(gate, dtype=torch.float64, requires_grad=True)
    total, start = torch.zeros((), dtype=torch.float64), 0
    for size in SIZES:
        taken, free = torch.zeros((), dtype=torch.float64), 0
        for unit in range(start, start + size):
            if not in_use[unit]:
                taken, free = taken + a[unit], free + 1
        if free:
            excess = taken / free - 1 / n_tasks
            assume(abs(float(excess.detach())) > 1e-6)  # at the kink of the maximum there is no one gradient
            if excess > 0:
                total = total + excess
        start += size
    expected = torch.autograd.grad(0.7 * total, a, allow_unused=True)[0] if total.requires_grad else None
    regulariser = SparsityRegulariser(0.7, "quota", torch.tensor(in_use), SIZES, n_tasks)
    assert float(regulariser(torch.tensor(gate))) == pytest.approx(0.7 * float(total.detach()), abs=1e-6)
    gradient = regulariser.gradient(torch.tensor(gate))
    assert torch.allclose(gradient.double(), torch.zeros(9).double() if expected is None else expected, atol=1e-6)


# Locked tasks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HAT, AmnesiacHAT])
@pytest.mark.parametrize("optimizer", ["adam decay", "momentum"])
@pytest.mark.parametrize("locked", [[0], [1], [2, 1, 3], []])
def test_only_locked_tasks_keep_the_bits_of_their_logits(kind, optimizer, locked):
    strategy, benchmark = make(kind, optimizer=optimizer, adjustment=AdjustmentRule(locked=locked)), permuted(4)
    kept, drifted = {}, set()
    for task, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        now = logits_of(strategy, benchmark, range(task + 1))
        drifted |= {earlier for earlier in kept if not torch.equal(now[earlier], kept[earlier])}
        kept = now
    assert drifted == {0, 1, 2} - set(locked)


def entry_use(model: MaskedModel, name: str, tasks) -> torch.Tensor:
    """For every entry of a parameter, the number that ``min`` of the two units' uses by these tasks makes: a loop."""
    layers = list(model.graph.layers)
    layer, kind = name.rsplit(".", 1)
    parameter = dict(model.backbone.named_parameters())[name]
    use = torch.zeros(parameter.shape)
    for i in range(parameter.shape[0]):
        of_unit = sum(bool(model.masks[task][layer][i]) for task in tasks)
        if kind == "bias":
            use[i] = of_unit
            continue
        for j in range(parameter.shape[1]):
            at = layers.index(layer)
            source = sum(bool(model.masks[task][layers[at - 1]][j]) for task in tasks) if at else len(tasks)
            use[i, j] = min(of_unit, source)
    return use


def small_mlp() -> MaskedModel:
    torch.manual_seed(0)
    return MaskedModel(MLP(64, hidden=(12,), features=10))


def test_what_is_protected_against_a_loop_over_entries():
    strategy, benchmark = (
        make(model=small_mlp(), optimizer="adam", adjustment=AdjustmentRule(locked=[0, 2])),
        permuted(4),
    )
    moved_of_unlocked = 0
    for task, experience in enumerate(benchmark.train_stream):
        locked = [earlier for earlier in (0, 2) if earlier < task]
        unlocked = [earlier for earlier in (1,) if earlier < task]
        before = values(strategy.model.backbone)
        strategy.train(experience)
        for name, p in strategy.model.backbone.named_parameters():
            moved = p.detach() != before[name]
            assert not bool(moved[entry_use(strategy.model, name, locked) > 0].any())
            assert not bool(moved[entry_use(strategy.model, name, [task]) == 0].any())
            moved_of_unlocked += int(moved[entry_use(strategy.model, name, unlocked) > 0].sum())
    assert moved_of_unlocked > 0


@pytest.mark.parametrize("locked", [{0, 2}, {1}, {3}, set(), None])
def test_importance_and_capacity_count_locked_tasks_alone(locked):
    strategy = learn(
        make(AdaHAT, model=small_mlp(), adjustment=AdaHATRule(locked=locked)), permuted(4).train_stream[:3]
    )
    model = strategy.model
    counted = [task for task in range(3) if locked is None or task in locked]
    use = TaskUse(model, locked)
    assert use.n_tasks == len(counted)
    units = torch.stack([torch.zeros(model.n_units).bool(), *map(model.binary_mask, counted)]).any(0)
    assert torch.equal(use.in_use, units)
    naive = {name: entry_use(model, name, counted) for name in use.importance}
    for name, expected in naive.items():
        assert torch.equal(use.importance[name], expected)
    n = sum(expected.numel() for expected in naive.values())
    for rule in (AdaHATRule(0.01, 0.1, locked=locked), AdjustmentRule(locked=locked)):
        find_plugin(strategy, HATPlugin).rule = rule
        if isinstance(rule, AdaHATRule):
            free = sum(float((0.1 / (e.double() + 0.1)).sum()) for e in naive.values())
        else:  # of the cumulative mask: both ends in use by locked tasks, not necessarily by the same one
            free = n - sum(float(h.double().sum()) for h in use.covered.values())
        assert network_capacity(strategy) == pytest.approx(free / n, abs=1e-6)
    if not counted:
        assert network_capacity(strategy) == 1.0


def test_the_price_of_units_counts_locked_tasks_alone():
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


def test_all_tasks_locked_is_the_default_and_none_locked_is_no_protection():
    # A price would count units in use of unprotected tasks too.
    options = {"optimizer": "adam", "masks": HardAttention(sparsity_weight=0.0)}
    default, every = (
        learn(make(**options, **more), permuted().train_stream)
        for more in ({}, {"adjustment": AdjustmentRule(locked=iter(range(3)))})
    )
    assert same_state(state(default.model), state(every.model))
    none, open_to_all = (
        learn(make(**options, **more), permuted().train_stream)
        for more in ({"adjustment": AdjustmentRule(locked=())}, {"adjustment": "constant"})
    )
    assert same_state(state(none.model), state(open_to_all.model))
    assert not same_state(state(none.model), state(default.model))


@pytest.mark.parametrize("locked", [[-1], [0, 1.0], "01", 3, [True], [None]])
@pytest.mark.parametrize("kind", [HAT, AdaHAT, AmnesiacHAT])
def test_locked_tasks_are_labels(kind, locked):
    with pytest.raises(ValueError, match=r"locked must be task labels \(ints of at least 0\).*got"):
        make(kind, adjustment=AdjustmentRule(locked=locked))


def test_a_clamp_whose_cosh_overflows_is_refused():
    with pytest.raises(ValueError, match="compensation_clamp must be at most 88, got 100"):
        make(masks=HardAttention(compensation_clamp=100))
    strategy = learn(make(masks=HardAttention(compensation_clamp=88), train_epochs=1), permuted(1).train_stream)
    assert bool(strategy.model.task_embedding(0).isfinite().all())


# Unlearning where tasks are not locked ------------------------------------------------------------------------------

STREAM = permuted(4, n_train=60)


amnesiac = partial(make, AmnesiacHAT, optimizer="adam", train_epochs=1)


def test_unlearning_gives_overwritten_values_back_exactly():
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


def test_a_task_that_a_later_one_overwrote_is_approximate():
    """It protected nothing, but the later task began from its values and read its units."""
    strategy = learn(amnesiac(adjustment=AdjustmentRule(locked=[0])), STREAM.train_stream[:3])
    assert strategy.unlearn([1]).claim == "approximate"
    refs = References(lambda **kw: amnesiac(adjustment=AdjustmentRule(locked=[0]), **kw), STREAM)
    assert bits(strategy.model) != bits(refs.reference([0, 2]))
    assert strategy.unlearn([2]).claim == "exact"
    assert bits(strategy.model) == bits(refs.reference([0]))


@pytest.mark.parametrize("locked", [[], [0], [1, 3]], ids=str)
@pytest.mark.parametrize("rule", [AdjustmentRule, AdaHATRule])
@pytest.mark.parametrize("init", [None, "sparse"])
def test_random_sequences_are_called_exact_only_where_they_are(locked, rule, init):
    options = {"adjustment": rule(locked=locked), "masks": replace(EVEN_BUDGET, embedding_init=init)}
    refs = References(lambda **kw: amnesiac(**options, **kw), STREAM)
    claims = []
    for seed in range(6):
        chance, strategy = random.Random(seed), amnesiac(**options)
        for _ in range(14):
            remaining = list(find_plugin(strategy, UnlearningPlugin).ledger.remaining)
            if remaining and (len(remaining) == 4 or chance.random() < 0.4):
                gone = chance.sample(remaining, chance.randint(1, min(2, len(remaining))))
                claims.append(strategy.unlearn(gone).claim)
                remaining = find_plugin(strategy, UnlearningPlugin).ledger.remaining
                if claims[-1] == "exact":
                    assert bits(strategy.model) == bits(refs.reference(remaining)), (seed, gone, remaining)
            else:
                strategy.train(STREAM.train_stream[chance.choice([t for t in range(4) if t not in remaining])])
    assert claims.count("exact") > 2
    assert claims.count("approximate") > 1
