"""What was made cheaper says and computes the same: hashes of a record, values in two threads, fitted heads."""

import pytest
import torch
from support.strategies import DIGITS, amnesiac
from support.strategy_state import bits
from torch.nn import functional as F

from avalanche_amnesia.trajectory import removal
from avalanche_amnesia.unlearning.logistic import fit_head


@pytest.fixture
def strategy():
    made = amnesiac(train_epochs=1)
    for experience in DIGITS.train_stream[:3]:
        made.train(experience)
    return made


@pytest.mark.parametrize("tasks", [[0], [2], [0, 1]])
def test_a_record_s_hashes_are_those_of_the_states_before_and_after(strategy, tasks):
    before = bits(strategy.model)
    record = strategy.unlearn(tasks)
    after = bits(strategy.model)
    assert record.after == after
    assert {c.name: c.before for c in record.changes if c.before} | dict(record.unchanged) == before
    assert {c.name for c in record.changes} == {n for n in before | after if before.get(n) != after.get(n)}


def test_two_threads_take_the_same_out_as_one(strategy, monkeypatch):
    store = next(p for p in strategy.plugins if type(p).__name__ == "TrajectoryPlugin").trajectory
    current = {name: p.detach() for name, p in strategy.model.named_parameters()}
    two = store.remove([0, 1], current)
    monkeypatch.setattr(removal, "two_at_a_time", lambda work, things: [work(thing) for thing in things])
    one = store.remove([0, 1], current)
    assert two.values
    assert list(two.values) == list(one.values)
    assert all(torch.equal(value, one.values[name]) for name, value in two.values.items())
    assert all(torch.equal(index, one.moved[name]) for name, index in two.moved.items())
    for task, updates in two.updates.items():
        assert list(updates) == list(one.updates[task])
        assert all(torch.equal(update, one.updates[task][name]) for name, update in updates.items())


def test_a_fitted_head_is_the_minimum_of_its_loss():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 4
    x = torch.randn(400, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3
    x = x + 2 * torch.randn(4, 6, generator=generator)[y]
    x = x.double()
    weight, bias = fit_head(x, y, 4, penalty=1e-6, iterations=60)
    found = [weight.requires_grad_(), bias.requires_grad_()]
    slopes = torch.autograd.grad(F.cross_entropy(F.linear(x, *found), y), found)
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-3
