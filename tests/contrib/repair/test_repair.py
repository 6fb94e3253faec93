"""Repair of affected tasks helps them and changes no other bit."""

from functools import partial

import pytest
import torch
from support.fault_injection import raiser
from support.repaired_strategies import PERMUTED, TEST, own_names, plugin_of, trained
from support.strategies import accuracy, amnesiac, batch_normed, logits, stock
from support.strategy_state import fingerprint, unchanged, unlearning_plugin, values

from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.seeding import rng_state
from avalanche_amnesia.training.plugins.task_mask import DivergedError

NORMED = partial(batch_normed, 2)


def test_a_repair_changes_no_bit_outside_the_overlap():
    plain, ours = trained(optimizer="adamw"), trained("joint", optimizer="adamw")
    before = values(plain.model)
    assert all(same_bits(before[name], value).all() for name, value in values(ours.model).items())
    plain.unlearn([1])
    untouched = logits(plain, TEST[0])
    record = ours.unlearn([1])
    assert record.plan.repaired == record.affected == (2, 3)
    assert same_bits(logits(ours, TEST[0]), untouched).all()
    model = ours.model
    use, of_others = (model.graph.parameter_use(*(model.masks[t] for t in tasks)) for tasks in ((2, 3), (0,)))
    after, own = values(ours.model), own_names(ours, (2, 3))
    moved_at_all = 0
    for name, value in values(plain.model).items():
        moved = ~same_bits(value, after[name])
        assert record.repair.entries.get(name, 0) == int(moved.sum())
        if name in own or not bool(moved.any()):
            continue
        inside = name.removeprefix("backbone.")
        overlap = ~same_bits(before[name], value) & (use[inside] > 0) & (of_others[inside] == 0)
        assert not bool((moved & ~overlap).any()), name
        moved_at_all += int(moved.sum())
    assert moved_at_all > 0
    assert record.claim == "approximate"


def test_only_norms_of_affected_tasks_are_repaired():
    plain, ours = (trained(repair, net=NORMED, optimizer="adamw", train_epochs=1) for repair in (None, "joint"))
    affected = plain.unlearn([1]).affected
    assert ours.unlearn([1]).plan.repaired == affected
    a, b = plain.model.state_dict(), ours.model.state_dict()
    moved = {name for name in a if not same_bits(a[name], b[name]).all()}
    of_affected = tuple(f"heads.{task}." for task in affected)
    assert all(name.startswith(("backbone.", *of_affected)) for name in moved)
    assert any(name.endswith("running_mean") for name in moved)
    assert same_bits(logits(ours, TEST[0]), logits(plain, TEST[0])).all()
    columns = ours.model.by_layer(ours.model.binary_mask(3))["4"]  # weight decay changes no unused entries
    closed = (~columns).repeat_interleave(4)
    assert bool(closed.any())
    assert same_bits(a["heads.3.weight"][:, closed], b["heads.3.weight"][:, closed]).all()


def test_a_repair_improves_affected_tasks_on_test_data():
    plain, ours = trained(), trained("joint")
    affected = plain.unlearn([1]).affected
    record = ours.unlearn([1])
    assert record.repair.samples == {2: 50, 3: 50}
    assert record.repair.steps == 50
    assert '"repair": {' in record.to_json()
    assert sum(accuracy(ours, TEST[t]) for t in affected) > sum(accuracy(plain, TEST[t]) for t in affected) + 0.1


def test_the_last_task_is_unlearned_exactly_and_needs_no_repair():
    for adjustment in ("hat", "adahat"):  # adahat: earlier tasks get back entries that the last one changed
        strategy = trained("joint", adjustment=adjustment)
        record = strategy.unlearn([3])
        assert (record.claim, record.repair, record.plan.repaired) == ("exact", None, ())
        assert 3 not in plugin_of(strategy).memory.samples
    assert record.affected == (0, 1, 2)


@pytest.mark.parametrize(("where", "error"), [("step", KeyboardInterrupt), ("after", MemoryError)])
def test_an_error_during_a_repair_changes_nothing(monkeypatch, error, where):
    strategy = trained("joint", net=NORMED, compensation="counterfactual", train_epochs=1)
    strategy.unlearn([0])
    plugin, loss = plugin_of(strategy), DarkLoss.__call__

    def state():
        samples = {t: (s.x, s.y, s.logits) for t, s in plugin.memory.samples.items()}
        grads = [(p.requires_grad, p.grad) for p in strategy.model.parameters()]
        modes = [module.training for module in strategy.model.modules()]
        random = [part.tolist() if isinstance(part, torch.Tensor) else str(part) for part in rng_state()]
        return fingerprint(strategy, samples), str(grads), modes, random

    def fail(self, *args, calls=[]):  # noqa: B006 - counts its calls
        calls.append(1)
        torch.rand(1)
        if len(calls) == 60:
            raise error("injected")
        return loss(self, *args)

    with unchanged(state), monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(DarkLoss, "__call__", fail)
        else:
            patch.setattr(unlearning_plugin(strategy).ledger, "forget", raiser(error))
        with pytest.raises(error, match="injected"):
            strategy.unlearn([1])
    assert strategy.unlearn([1]).plan.repaired == (2, 3)


def test_a_diverged_repair_is_an_error_and_nothing_is_unlearned():
    strategy = trained(RepairPlugin(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30)))
    before = fingerprint(strategy)
    with pytest.raises(DivergedError, match=r"the repair of tasks \[2, 3\] diverged"):
        strategy.unlearn([1])
    assert fingerprint(strategy) == before


def test_the_memory_has_equally_many_samples_of_each_remaining_task():
    strategy = amnesiac(train_epochs=1, repair=RepairPlugin(size=60))
    plugin, first = plugin_of(strategy), None
    for position, experience in enumerate(PERMUTED.train_stream, start=1):
        assert int(experience.task_label) not in plugin.memory.samples
        strategy.train(experience)
        first = plugin.memory.samples[0] if first is None else first
        assert [len(s) for s in plugin.memory.samples.values()] == [60 // position] * position
    assert torch.equal(plugin.memory.samples[0].x, first.x[:15])
    x, _ = task_data(PERMUTED.train_stream[0])
    assert all((x == sample).flatten(1).all(1).any() for sample in first.x)
    strategy.unlearn([0, 2])
    assert list(plugin.memory.samples) == [1, 3]
    strategy.train(PERMUTED.train_stream[0])
    assert [len(s) for s in plugin.memory.samples.values()] == [15, 15, 20]


def test_wrong_arguments_are_refused():
    for options in ({"steps": 0}, {"batch_size": 1.5}, {"samples_per_task": 0}, {"size": 0}):
        with pytest.raises(ValueError, match="int of at least 1"):
            RepairPlugin(**options)
    with pytest.raises(ValueError, match="weights of at least 0"):
        RepairPlugin(logits=0.0, labels=0.0)
    with pytest.raises(TypeError, match="repair must be a plugin that repairs, or None, got 'joint'"):
        amnesiac(repair=lambda: "joint")
    with pytest.raises(TypeError, match="model with masks"):
        stock(plugins=[RepairPlugin()]).train(PERMUTED.train_stream[0])
