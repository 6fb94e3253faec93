"""Unlearning by AmnesiacHAT: removed and kept entries to the bit, the arithmetic of shared ones, plans and records."""

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from support.strategies import DIGITS, ConvNet, amnesiac, quiet, trained
from support.strategy_state import fingerprint, initial_values, state, trajectory, unlearning_plugin

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.training.update_rules import TaskUse


@pytest.mark.parametrize("adjustment", ["hat", "adahat"])
def test_capacity_equals_that_of_a_model_with_only_the_remaining_masks(adjustment):
    strategy = trained(4, adjustment=adjustment, train_epochs=1)
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


def test_affected_tasks_are_those_that_own_a_changed_entry():
    strategy = trained(5, net=ConvNet, train_epochs=1)
    masks = {task: strategy.model.by_layer(strategy.model.binary_mask(task)) for task in range(5)}
    before = initial_values(strategy.model)
    record = strategy.unlearn([1])
    moved = {name: p.detach() != before[name] for name, p in strategy.model.backbone.named_parameters()}
    uses = {task: strategy.model.graph.parameter_use(masks[task]) for task in (0, 2, 3, 4)}
    affected = [task for task, use in uses.items() if any((moved[n] & (use[n] > 0)).any() for n in moved)]
    assert list(record.affected) == affected
    assert affected  # the test would say nothing otherwise


def test_a_plan_changes_nothing_and_is_what_the_record_says():
    strategy = trained(4, train_epochs=1)
    before = fingerprint(strategy)
    generator = torch.get_rng_state()
    plan = strategy.plan_unlearning([1, 0])
    assert fingerprint(strategy) == before
    assert torch.equal(torch.get_rng_state(), generator)
    model = state(strategy.model)
    sizes = trajectory(strategy).nbytes()
    record = strategy.unlearn([1, 0])
    assert record.plan == plan
    assert plan.tasks == record.tasks == (1, 0)
    after = strategy.model.state_dict()
    assert set(plan.removed) == set(model) - set(after)
    changed = {n for n in after if tensor_hash(after[n]) != tensor_hash(model[n])}
    swapped = {name for name in changed if name.startswith("heads.")}  # by a compensation
    assert {int(name.split(".")[1]) for name in swapped} <= set(plan.compensated)
    assert set(plan.entries) == changed - swapped
    assert all(plan.entries[n] == int((after[n] != model[n]).sum()) for n in plan.entries)
    assert sizes - trajectory(strategy).nbytes() == plan.trajectory_bytes > 0
    assert {c.name for c in record.changes} == changed | set(plan.removed)
    for change in record.changes:
        assert change.before == tensor_hash(model[change.name])
        assert change.after == (tensor_hash(after[change.name]) if change.name in after else None)
    assert record.n_trained == 4
    assert record.iteration == strategy.clock.train_iterations
    assert unlearning_plugin(strategy).records == [record]


def test_results_after_an_unlearning_leave_out_the_unlearned_task():
    benchmark = with_unlearning(DIGITS, {1: [0]})
    strategy = amnesiac(evaluator=quiet(accuracy_metrics(experience=True)), train_epochs=1)
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
    strategy.train(benchmark.train_stream[0])
    assert name in strategy.eval(benchmark.test_stream)
    strategy.train(benchmark.train_stream[1])
    results = strategy.eval(benchmark.test_stream)
    assert name not in results
    assert "Top1_Acc_Exp/eval_phase/test_stream/Task001/Exp001" in results
    assert all(parameter.grad is None for parameter in strategy.model.parameters())
