"""Only locked tasks are protected: other earlier tasks may be overwritten, and are restored exactly."""

from functools import partial

import pytest
import torch
from support.small_runs import logits_of, make, permuted, use_of_entries
from support.strategies import Hears, learn
from support.strategy_state import bits

from avalanche_amnesia.evaluation import References
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import HAT, AdaHAT, AmnesiacHAT
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.update_rules import AdaHATRule, AdjustmentRule, RandomRule, TaskUse


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


def small_mlp() -> MaskedModel:
    torch.manual_seed(0)
    return MaskedModel(MLP(64, hidden=(12,), features=10))


@pytest.mark.parametrize("locked", [{0, 2}, set(), None])
def test_importance_and_capacity_count_only_locked_tasks(locked):
    strategy = learn(
        make(AdaHAT, model=small_mlp(), adjustment=AdaHATRule(locked=locked)), permuted(4).train_stream[:3]
    )
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
