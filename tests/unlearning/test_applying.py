"""Unlearning by AmnesiacHAT between tasks: what goes, what stays to the bit, and the arithmetic of what is shared."""

import random

import pytest
import torch
from support.strategies import DIGITS, ConvNet, amnesiac, learn, logits, mlp, trained
from support.strategy_state import bits, initial_values, owned, stray, trajectory, unlearning_plugin

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.evaluation import network_capacity
from avalanche_amnesia.training.update_rules import AdaHATRule, ConstantRule, TaskUse

CASES = [
    pytest.param(mlp, "hat", "adam", {}, id="hat"),
    pytest.param(mlp, "adahat", "momentum", {"reset_optimizer": False}, id="adahat-kept-momentum"),
    pytest.param(mlp, AdaHATRule(alpha=0.1), "adamw", {}, id="adahat-decay"),
    pytest.param(mlp, "hat", "adamw", {"reset_optimizer": False}, id="hat-kept-adamw"),
    pytest.param(ConvNet, "hat", "adam", {}, id="conv-hat"),
    pytest.param(ConvNet, AdaHATRule(alpha=0.1), "sgd", {}, id="conv-adahat"),
    pytest.param(mlp, ConstantRule(alpha=0.5), "adam", {}, id="constant"),
    pytest.param(mlp, "random", "sgd", {}, id="random"),
]


@pytest.mark.parametrize(("net", "adjustment", "optimizer", "options"), CASES)
def test_any_sequence_leaves_nothing_where_nobody_is(net, adjustment, optimizer, options):
    for seed in range(2):
        draw = random.Random(seed)
        strategy = amnesiac(net=net, adjustment=adjustment, optimizer=optimizer, **options)
        initial = initial_values(strategy.model)
        for _ in range(8):
            remaining = list(unlearning_plugin(strategy).ledger.remaining)
            if len(remaining) == 5 or (len(remaining) > 1 and draw.random() < 0.5):
                gone = draw.sample(remaining, draw.randint(1, min(3, len(remaining))))
                strategy.unlearn(gone)
                assert_gone(strategy, gone)
            else:
                strategy.train(DIGITS.train_stream[draw.choice([t for t in range(5) if t not in remaining])])
            assert stray(strategy.model, initial) == []
            remaining = unlearning_plugin(strategy).ledger.remaining
            assert trajectory(strategy).tasks == remaining == tuple(strategy.model.masks)
        if remaining:
            strategy.unlearn(remaining)
        assert list(strategy.model.state_dict()) == [f"backbone.{name}" for name in initial]
        for name, value in strategy.model.backbone.named_parameters():
            assert tensor_hash(value) == tensor_hash(initial[name])


def assert_gone(strategy, gone):
    model, optimizer = strategy.model, strategy.optimizer
    for task in gone:
        assert not [name for name in model.state_dict() if str(task) in name.split(".") and "layers" not in name]
        assert not [name for name in strategy.optimized_param_id if name.startswith(f"heads.{task}.")]
        assert task not in model.known_train_tasks_labels
    alive = {id(parameter) for parameter in model.parameters()}
    assert all(id(p) in alive for group in optimizer.param_groups for p in group["params"])
    assert not optimizer.state
    cumulative = torch.stack([model.binary_mask(t) for t in model.masks]).any(0) if model.masks else None
    assert not model.cumulative_mask().any() if cumulative is None else torch.equal(model.cumulative_mask(), cumulative)


@pytest.mark.parametrize("adjustment", ["hat", "adahat"])
def test_capacity_is_that_of_a_model_with_the_remaining_masks_alone(adjustment):
    strategy = trained(4, adjustment=adjustment)
    before = network_capacity(strategy)
    kept = {task: strategy.model.binary_mask(task) for task in (0, 3)}
    strategy.unlearn([1, 2])
    other = amnesiac(adjustment=adjustment)
    for task, mask in kept.items():
        other.model.start_task(task, torch.where(mask, 1.0, -1.0))
        other.model.finish_task()
    ours, fresh = TaskUse(strategy.model), TaskUse(other.model)
    assert ours.n_tasks == fresh.n_tasks == 2
    for name in fresh.covered:
        assert torch.equal(ours.covered[name], fresh.covered[name])
        assert torch.equal(ours.importance[name], fresh.importance[name])
    assert network_capacity(strategy) == network_capacity(other) > before
    strategy.unlearn([0, 3])
    assert network_capacity(strategy) == 1.0


def test_tasks_before_the_one_that_goes_keep_their_logits_bit_for_bit():
    strategy = trained(4)
    before = {task: logits(strategy, DIGITS.test_stream[task]) for task in range(4)}
    record = strategy.unlearn([2])
    assert torch.equal(logits(strategy, DIGITS.test_stream[0]), before[0])
    assert torch.equal(logits(strategy, DIGITS.test_stream[1]), before[1])
    assert record.affected == ((3,) if not torch.equal(logits(strategy, DIGITS.test_stream[3]), before[3]) else ())


def test_a_small_net_shares_and_the_dense_arithmetic_holds():
    """Every backbone entry after unlearning a middle task, by hand from the states between the tasks."""
    strategy = amnesiac(adjustment=AdaHATRule(alpha=0.1), optimizer="momentum")
    states = [initial_values(strategy.model)]
    for experience in DIGITS.train_stream[:3]:
        strategy.train(experience)
        states.append(initial_values(strategy.model))
    strategy.unlearn([1])
    shared = 0
    for name, value in strategy.model.backbone.named_parameters():
        one, two = states[2][name] != states[1][name], states[3][name] != states[2][name]
        both = one & two
        update = states[3][name].double() - states[2][name].double()
        expected = torch.where(one & ~two, states[1][name], states[3][name])
        expected[both] = (states[1][name].double() + update).float()[both]
        assert torch.equal(value.detach(), expected), name
        shared += int(both.sum())
    assert shared > 0


def test_several_tasks_at_once_equal_one_after_the_other_where_they_are_a_suffix():
    once, twice = trained(4), trained(4)
    once.unlearn([2, 3])
    twice.unlearn([3])
    twice.unlearn([2])
    assert bits(once.model) == bits(twice.model)


def test_a_second_request_never_brings_a_forgotten_task_back():
    """Entries of a forgotten task that nobody else owns stay initial through everything that follows."""
    stream = with_unlearning(DIGITS, {1: [0], 2: [2], 3: [1], 4: [4]}).train_stream
    strategy = amnesiac(adjustment=AdaHATRule(alpha=0.1))
    initial = initial_values(strategy.model)
    mask = None
    for experience in stream:
        strategy.train(experience)
        if experience.task_label == 0:
            mask = strategy.model.by_layer(strategy.model.binary_mask(0))
        assert stray(strategy.model, initial) == []
    use = strategy.model.graph.parameter_use(mask)
    exclusive = {n: (use[n] > 0).expand_as(o) & ~o for n, o in owned(strategy.model).items()}
    assert sum(int(e.sum()) for e in exclusive.values()) > 0
    for name, value in strategy.model.backbone.named_parameters():
        assert torch.equal(value[exclusive[name]], initial[name][exclusive[name]])


def test_requests_in_the_stream_equal_requests_by_hand():
    by_stream = amnesiac()
    for experience in with_unlearning(
        DIGITS, [UnlearningRequest((1,), 2), UnlearningRequest((0,), 3, "before")]
    ).train_stream:
        by_stream.train(experience)
    by_hand = trained(3)
    by_hand.unlearn([1])
    by_hand.unlearn([0])
    learn(by_hand, DIGITS.train_stream[3:])
    assert list(bits(by_stream.model).items()) == list(bits(by_hand.model).items())
    events = [record.plan.event for record in unlearning_plugin(by_stream).records]
    assert events == ["after task 2", "before task 3"]


@pytest.mark.parametrize("tasks", [[0], [2], [0, 1]])
def test_a_record_s_hashes_are_those_of_the_states_before_and_after(tasks):
    strategy = trained(3, train_epochs=1)
    before = bits(strategy.model)
    record = strategy.unlearn(tasks)
    after = bits(strategy.model)
    assert record.after == after
    assert {c.name: c.before for c in record.changes if c.before} | dict(record.unchanged) == before
    assert {c.name for c in record.changes} == {n for n in before | after if before.get(n) != after.get(n)}
