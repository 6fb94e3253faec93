"""Pools of units: how they are dealt, what a task may take and read, and that nothing else moves or is read."""

import functools
from dataclasses import replace

import pytest
import torch
from avalanche.benchmarks import CLScenario
from hypothesis import given, settings
from hypothesis import strategies as st
from support.network_families import FAMILIES, stream
from support.small_runs import (
    OPTIMIZERS,
    assert_retained,
    make,
    masked_mlp,
    permuted,
    split,
)
from support.strategies import learn
from support.strategy_state import same_state, state

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.evaluation import References
from avalanche_amnesia.isolation import CapacityError, Pools
from avalanche_amnesia.isolation.pools import StreamLayout, allocation_of, pool
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import EVEN_BUDGET, HAT, AdaHAT, AdaHATRule, AdjustmentRule, AmnesiacHAT
from avalanche_amnesia.training.update_rules import TaskUse
from avalanche_amnesia.unit_graph.values import ALWAYS, NOTHING

pooled = functools.partial(make, isolation="pools")


# Dealing -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 12))
def test_pools_part_every_layer_in_equal_shares(sizes, slots):
    pools = torch.stack([pool(sizes, slots, frozenset({slot})) for slot in range(slots)])
    assert torch.equal(pools.sum(0), torch.ones(sum(sizes), dtype=torch.int64))
    assert torch.equal(pool(sizes, slots, frozenset(range(slots))), torch.ones(sum(sizes), dtype=torch.bool))
    for layer in pools.split(sizes, 1):
        shares = layer.sum(1)
        assert int(shares.max() - shares.min()) <= 1


def layout(tasks=(0, 1, 2, 3), permanent=(), deadline=None, slots=None):
    return StreamLayout(tuple(tasks), frozenset(permanent), deadline, slots)


def test_slots_follow_from_labels():
    assert [layout((7, 3, 5)).slot(task) for task in (3, 5, 7)] == [0, 1, 2]
    assert [layout((7, 3, 5), slots=2).slot(task) for task in (3, 5, 7, 8)] == [1, 1, 1, 0]
    of_permanent = layout(permanent=[1, 3])
    assert of_permanent.slots_of(1) == of_permanent.slots_of(3) == {1, 3}
    assert of_permanent.slots_of(2) == {2}


@pytest.mark.parametrize(
    ("permanent", "deadline", "task", "to", "is_open"),
    [
        ((), None, 0, 3, False),
        ((0,), None, 0, 1, True),
        ((3,), None, 3, 0, True),  # 0 learned again
        ((), 2, 0, 2, False),
        ((), 2, 0, 3, True),
        ((), 2, 3, 0, False),
        ((9,), 1, 9, 3, False),  # of another stream
    ],
)
def test_open_tasks_follow_from_the_stream(permanent, deadline, task, to, is_open):
    assert layout(permanent=permanent, deadline=deadline).is_open(task, to) == is_open


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["mlp", "resnet cifar", "densenet", "vit"]), st.integers(0, 10**6))
def test_entries_within_agree_with_a_look_at_every_entry(family, seed):
    model = model_of(family)
    units = torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < 0.6
    chosen, sets = set(units.nonzero()[:, 0].tolist()), model.graph.sets
    inside = {number for number in range(len(sets._sets)) if number not in (ALWAYS, NOTHING)}
    inside = torch.tensor([n in inside and set(sets.members(n)) <= chosen for n in range(len(sets._sets))])
    fast = model.graph.entries_within(units)
    for name, factors in model.graph.factors.items():
        slow = functools.reduce(torch.logical_or, [inside[factor] for factor in factors])
        assert torch.equal(fast[name].broadcast_to(slow.shape), slow)


@functools.cache
def model_of(family: str) -> MaskedModel:
    factory, shape, options = FAMILIES[family]
    torch.manual_seed(0)
    return MaskedModel(factory(), **{"input_shape": shape, **options})


# Training ----------------------------------------------------------------------------------------------------------


def units_of(strategy, task):
    return strategy.model.binary_mask(task)


@pytest.mark.parametrize("kind", [HAT, AdaHAT, AmnesiacHAT])
def test_masks_stay_in_their_pools_and_earlier_tasks_keep_their_bits(kind):
    strategy, benchmark = pooled(kind, optimizer="adam decay"), split()
    assert_retained(strategy, benchmark)
    sizes = [layer.units for layer in strategy.model.graph.layers.values()]
    for task in range(5):
        outside = ~pool(sizes, 5, frozenset({task}))
        assert not bool((units_of(strategy, task) & outside).any())


def test_a_permanent_task_is_read_and_not_moved():
    benchmark = with_unlearning(permuted(3), {}, permanent=[0])
    strategy = pooled(AmnesiacHAT, optimizer="adam", train_epochs=4)
    assert_retained(strategy, benchmark)
    for task in (1, 2):
        assert bool((units_of(strategy, task) & units_of(strategy, 0)).any())
    assert not bool((units_of(strategy, 1) & units_of(strategy, 2) & ~units_of(strategy, 0)).any())


def test_adahat_adjusts_permanent_tasks_for_permanent_ones_alone():
    benchmark = with_unlearning(permuted(3), {}, permanent=[0, 2])
    strategy = learn(pooled(AdaHAT, adjustment=AdaHATRule(alpha=1.0), optimizer="adam"), benchmark.train_stream[:1])
    mine = strategy.model.graph.parameter_use(strategy.model.masks[0])
    after = []
    for experience in benchmark.train_stream[1:]:
        before = state(strategy.model.backbone)
        strategy.train(experience)
        now = state(strategy.model.backbone)
        after.append(any(bool((now[n] != before[n])[mine[n].expand_as(now[n]) > 0].any()) for n in mine))
    assert after == [False, True]


def test_what_is_free_for_a_task_is_read_by_nobody_else():
    """Through every pair of pools of a residual net: an entry that one may move, the other can't read."""
    model = model_of("resnet cifar")
    free, read = [], []
    for task in range(4):
        allocation = allocation_of(task, model, layout(), min_units=1, when_full="error")
        fixed = TaskUse.within(model, allocation).fixed
        use = model.graph.parameter_use(model.by_layer(allocation.allowed))
        free.append({name: (use[name] > 0) & (fixed[name] == 0) for name in fixed})
        read.append({name: (use[name] > 0).expand_as(fixed[name]) for name in fixed})
    for one in range(4):
        assert sum(int(entries.sum()) for entries in free[one].values()) > 0
        for other in range(4):
            clash = any(bool((free[one][name] & read[other][name]).any()) for name in free[one])
            assert clash == (one == other)


# Exactness over optimizers and networks ----------------------------------------------------------------------------


def equal_after(make_strategy, benchmark: CLScenario, gone: list[int]) -> bool:
    strategy = learn(make_strategy(), benchmark.train_stream[:3])
    assert strategy.plan_unlearning(gone).claim == "exact"
    strategy.unlearn(gone)
    remaining = [task for task in range(3) if task not in gone]
    reference = References(make_strategy, benchmark).reference(remaining)
    return same_state(state(strategy.model), state(reference))


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adafactor"}))
def test_exact_under_every_optimizer_that_moves_entries_one_by_one(optimizer):
    assert equal_after(lambda **kw: pooled(AmnesiacHAT, optimizer=optimizer, dropout=0.1, **kw), split(), [0, 1])


@pytest.mark.parametrize(
    "family",
    ["vgg bn", "resnet cifar", "mobilenet v3", "vit", "group norm", "transposed"],
)
def test_exact_in_every_kind_of_network(family, data_root):
    factory, shape, model_options = FAMILIES[family]

    def make_strategy(**options):
        torch.manual_seed(0)
        model = MaskedModel(factory(), **{"input_shape": shape, **model_options})
        return pooled(AmnesiacHAT, optimizer="adam decay", model=model, train_epochs=1, **options)

    assert equal_after(make_strategy, stream(data_root, shape), [1])


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isolation": "walls"}, "isolation must be one of 'none', 'pools'"),
        ({"isolation": "pools", "masks": replace(EVEN_BUDGET, embedding_init="last")}, "another task's mask"),
        ({"isolation": "pools", "adjustment": AdjustmentRule(space="gradient")}, "update space"),
        ({"isolation": "pools", "adjustment": AdjustmentRule(locked=[0])}, "leave locked out"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(HAT, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots must be"),
        ({"slots": 2.0}, "slots must be"),
        ({"when_full": "wait"}, "when_full must be one of 'error', 'share'"),
    ],
)
def test_pools_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pools(**options)


@pytest.mark.parametrize("isolation", [Pools, 3, None])
def test_what_makes_no_pools_is_refused(isolation):
    with pytest.raises(TypeError, match=r"isolation must be 'none', 'pools' or Pools\(slots=…\)"):
        make(HAT, isolation=isolation)


def test_too_many_slots_for_a_layer_are_refused_before_anything_changes():
    strategy = make(AmnesiacHAT, isolation=Pools(slots=12), model=MaskedModel(MLP(64, hidden=(40,), features=11)))
    before = state(strategy.model)
    with pytest.raises(CapacityError, match=r"12 slots need at least 12 units.*layers\.1.: 11.*slots=….? a smaller"):
        strategy.train(split().train_stream[0])
    assert same_state(before, state(strategy.model))


def test_a_pool_that_a_permanent_task_filled_is_refused():
    benchmark = with_unlearning(permuted(3), {}, permanent=[0])
    options = {
        "isolation": Pools(slots=2),
        "masks": replace(EVEN_BUDGET, embedding_init="ones", sparsity_weight=0.0, budget=None),
    }
    strategy = learn(pooled(AmnesiacHAT, model=masked_mlp(), **options), benchmark.train_stream[:2])
    with pytest.raises(CapacityError, match=r"task 2 finds fewer than 1 free units .* tasks \[0\] keep for good"):
        strategy.train(benchmark.train_stream[2])
