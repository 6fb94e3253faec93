"""Plans: who is affected, what will change, and that planning changes nothing."""

import pytest
import torch
from support.strategies import ConvNet, mlp, trained
from support.strategy_state import fingerprint, initial_values, state, trajectory, unlearning_plugin

from avalanche_amnesia.bits import tensor_hash


@pytest.mark.parametrize("net", [mlp, ConvNet])
def test_affected_are_the_remaining_tasks_that_own_a_changed_entry(net):
    strategy = trained(5, net=net)
    masks = {task: strategy.model.by_layer(strategy.model.binary_mask(task)) for task in range(5)}
    before = initial_values(strategy.model)
    record = strategy.unlearn([1])
    affected = [
        task
        for task in (0, 2, 3, 4)
        if any(
            ((p.detach() != before[n]) & (strategy.model.graph.parameter_use(masks[task])[n] > 0)).any()
            for n, p in strategy.model.backbone.named_parameters()
        )
    ]
    assert list(record.affected) == affected
    assert affected  # the test would say nothing otherwise


def test_a_plan_changes_nothing_and_is_what_the_record_says():
    strategy = trained(4)
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
