"""Repair of affected tasks helps them and changes no other bit; the next request removes every repair."""

import copy
from functools import cache, partial

import pytest
import torch
from support import strategy_state as states
from support.fault_injection import FailsAtEvent, raiser
from support.strategies import accuracy, amnesiac, batch_normed, learn, logits, stock

from avalanche_amnesia.benchmarks import PermutedDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.seeding import rng_state
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.task_mask import DivergedError
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.store import TrajectoryError

PERMUTED = PermutedDigits(4, n_train=600, n_test=300)
TEST = PERMUTED.test_stream


@cache
def _trained(repair, **options):
    plugin = RepairPlugin() if repair == "joint" else repair
    strategy = amnesiac(**{"train_epochs": 4, "compensation": "none", "repair": plugin, **options})
    return learn(strategy, PERMUTED.train_stream)


def trained(repair=None, **options):
    """A strategy that has learned four tasks, to be changed at will."""
    return copy.deepcopy(_trained(repair, **options))


def plugin_of(strategy):
    return find_plugin(strategy, RepairPlugin)


NORMED = partial(batch_normed, 2)


def test_a_repair_changes_no_bit_outside_the_overlap():
    plain, ours = trained(optimizer="adamw"), trained("joint", optimizer="adamw")
    before = states.values(plain.model)
    assert all(same_bits(before[name], value).all() for name, value in states.values(ours.model).items())
    plain.unlearn([1])
    untouched = logits(plain, TEST[0])
    record = ours.unlearn([1])
    assert record.plan.repaired == record.affected == (2, 3)
    assert same_bits(logits(ours, TEST[0]), untouched).all()
    model = ours.model
    use, of_others = (model.graph.parameter_use(*(model.masks[t] for t in tasks)) for tasks in ((2, 3), (0,)))
    after = states.values(ours.model)
    own = {name for name in after if name.startswith(("heads.2.", "heads.3."))}
    moved_at_all = 0
    for name, value in states.values(plain.model).items():
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
        return states.fingerprint(strategy, samples), str(grads), modes, random

    def fail(self, *args, calls=[]):  # noqa: B006 - counts its calls
        calls.append(1)
        torch.rand(1)
        if len(calls) == 60:
            raise error("injected")
        return loss(self, *args)

    with states.unchanged(state), monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(DarkLoss, "__call__", fail)
        else:
            patch.setattr(states.unlearning_plugin(strategy).ledger, "forget", raiser(error))
        with pytest.raises(error, match="injected"):
            strategy.unlearn([1])
    assert strategy.unlearn([1]).plan.repaired == (2, 3)


def test_a_diverged_repair_is_an_error_and_nothing_is_unlearned():
    strategy = trained(RepairPlugin(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30)))
    before = states.fingerprint(strategy)
    with pytest.raises(DivergedError, match=r"the repair of tasks \[2, 3\] diverged"):
        strategy.unlearn([1])
    assert states.fingerprint(strategy) == before


def test_the_memory_has_equally_many_samples_of_each_remaining_task():
    strategy = amnesiac(train_epochs=1, repair=RepairPlugin(samples_per_task=15))
    plugin, first = plugin_of(strategy), None
    for position, experience in enumerate(PERMUTED.train_stream, start=1):
        assert int(experience.task_label) not in plugin.memory.samples
        strategy.train(experience)
        first = plugin.memory.samples[0] if first is None else first
        assert [len(s) for s in plugin.memory.samples.values()] == [15] * position
    assert torch.equal(plugin.memory.samples[0].x, first.x)
    x, _ = task_data(PERMUTED.train_stream[0])
    assert all((x == sample).flatten(1).all(1).any() for sample in first.x)
    strategy.unlearn([0, 2])
    assert list(plugin.memory.samples) == [1, 3]
    strategy.train(PERMUTED.train_stream[0])
    assert list(plugin.memory.samples) == [1, 3, 0]


def test_wrong_arguments_are_refused():
    for options in ({"steps": 0}, {"batch_size": 1.5}, {"samples_per_task": 0}):
        with pytest.raises(ValueError, match="int of at least 1"):
            RepairPlugin(**options)
    with pytest.raises(ValueError, match="weights of at least 0"):
        RepairPlugin(logits=0.0, labels=0.0)
    with pytest.raises(TypeError, match=r"repair must be a repairing plugin or None: .* got 'joint'"):
        amnesiac(repair=lambda: "joint")
    with pytest.raises(TypeError, match="model with masks"):
        stock(plugins=[RepairPlugin()]).train(PERMUTED.train_stream[0])


def test_the_next_request_starts_from_values_without_the_repair(monkeypatch):
    plain, ours = trained(compensation="counterfactual"), trained("joint", compensation="counterfactual")
    for request in ([1], [2]):
        plain.unlearn(request)
        found, repair = [], RepairPlugin.repair

        def look(self, model, *args, repair=repair, found=found):
            found.append(states.bits(model))
            return repair(self, model, *args)

        with monkeypatch.context() as patch:
            patch.setattr(RepairPlugin, "repair", look)
            record = ours.unlearn(request)
        assert found == [states.bits(plain.model)]
        assert record.repair.steps == 50
        assert states.bits(ours.model) != states.bits(plain.model)
    assert states.trajectory(ours).tasks == (0, 3)


def test_unlearning_all_tasks_restores_the_initial_bits():
    initial = states.initial_values(amnesiac().model)
    for order in ([[0], [2], [1], [3]], [[1], [0, 3], [2]]):
        strategy = trained("joint")
        for request in order:
            strategy.unlearn(request)
            assert states.stray(strategy.model, initial) == []
            assert sorted(plugin_of(strategy).memory.samples) == list(states.trajectory(strategy).tasks)
        assert states.trajectory(strategy).logs == {}
        assert all(torch.equal(p, initial[name]) for name, p in strategy.model.backbone.named_parameters())


def test_a_request_during_a_task_repairs_the_values_before_the_task():
    benchmark = with_unlearning(PERMUTED, [UnlearningRequest((0,), 3, "iteration", 20)])
    options = {"train_epochs": 3, "adjustment": "adahat", "compensation": "counterfactual"}
    strategy, plain = (amnesiac(repair=repair, **options) for repair in (RepairPlugin, None))
    for s in (strategy, plain):
        learn(s, benchmark.train_stream)
    (record,) = states.unlearning_plugin(strategy).records
    assert record.plan.repaired == (1, 2)
    assert not {name for name in states.trajectory(strategy).logs[3] if name.startswith("heads.")}
    strategy.unlearn([3])  # removes the repair and restores no older head
    plain.unlearn([3])
    stored = states.trajectory(strategy).remove((), states.values(strategy.model))
    without = states.values(strategy.model) | dict(stored.values)
    heads = {name: value for name, value in states.values(plain.model).items() if "heads" in name}
    assert all(same_bits(value, without[name]).all() for name, value in heads.items())
    strategy.unlearn([1, 2])
    initial = states.initial_values(amnesiac().model)
    assert all(torch.equal(p, initial[name]) for name, p in strategy.model.backbone.named_parameters())


def test_an_interrupted_training_keeps_a_repair_made_during_it():
    class Stops(RepairPlugin):
        def before_update(self, strategy, **kwargs):
            if states.unlearning_plugin(strategy).records:
                raise KeyboardInterrupt

    benchmark = with_unlearning(PERMUTED, [UnlearningRequest((0,), 2, "iteration", 5)])
    strategy = learn(amnesiac(train_epochs=2, repair=Stops()), benchmark.train_stream[:2])
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[2])
    strategy.abort_training()
    between = learn(amnesiac(train_epochs=2, repair=RepairPlugin()), PERMUTED.train_stream[:2])
    between.unlearn([0])
    assert states.bits(strategy.model) == states.bits(between.model)


def test_a_repair_is_kept_if_a_recorded_task_is_aborted():
    fails = FailsAtEvent(error=MemoryError)
    strategy = learn(amnesiac(train_epochs=2, repair=RepairPlugin(), plugins=[fails]), PERMUTED.train_stream[:3])
    strategy.unlearn([0])
    before, logs, fails.event = states.bits(strategy.model), states.trajectory(strategy).logs, "after_training_exp"
    with pytest.raises(MemoryError, match="injected"):
        strategy.train(PERMUTED.train_stream[3])
    strategy.abort_training()
    assert states.bits(strategy.model) == before
    assert states.trajectory(strategy).logs == logs


@pytest.mark.parametrize(("options", "threshold"), [({"dtype": torch.int8}, 0.0), ({}, 0.3)], ids=["int8", "threshold"])
def test_a_repair_is_removed_bit_for_bit_with_any_kind_of_log(options, threshold):
    generator = torch.Generator().manual_seed(0)
    store, value = Trajectory(**options), torch.randn(6, 5, generator=generator)
    for task in range(2):
        after = value + torch.randn(6, 5, generator=generator)
        after = torch.where((after - value).abs() < threshold, value, after)  # like PrunedTrajectoryPlugin
        value = store.record(task, {"w": value}, {"w": after}).get("w", after)
    repaired = value.clone()
    repaired[::2] += torch.randn(3, 5, generator=generator)
    store.record_repair({"w": value}, {"w": repaired})
    with pytest.raises(TrajectoryError, match="a repair is recorded already"):
        store.record_repair({"w": value}, {"w": repaired})
    assert store.tasks == (0, 1)
    assert list(store.report()) == [0, 1]
    assert store.nbytes() > store.nbytes(0) + store.nbytes(1)
    assert store.moved_with(())["w"].sum() == 15
    assert same_bits(store.remove((), {"w": repaired}).values["w"], value).all()
    twin = Trajectory(**options)
    twin.logs = {task: log for task, log in store.logs.items() if task >= 0}
    for gone in ([0], [1]):
        assert same_bits(
            store.remove(gone, {"w": repaired}).values["w"], twin.remove(gone, {"w": value}).values["w"]
        ).all()


def test_a_repair_is_removed_with_the_tasks_of_its_samples():
    """Updates are powers of two."""
    store, value = Trajectory(), torch.zeros(2)
    for task in range(4):
        before, value = value, value + torch.tensor([2.0**task, 0.0])
        store.record(task, {"w": before}, {"w": value})
    for part, tasks in ((0.5, [0, 1]), (0.25, [1, 2]), (0.125, [3])):
        before, value = value, value + part
        store.record_repair({"w": before}, {"w": value}, tasks)
    assert store.tasks == (0, 1, 2, 3)
    assert store.repairs == {-1: {0, 1}, -2: {1, 2}, -3: {3}}
    assert store.values_before(3, {"w": value})["w"].tolist() == [7, 0]
    for gone, tasks, repairs in (([0], 14, 0.375), ([1], 13, 0.125), ([2, 3], 3, 0.5), ([], 15, 0.875)):
        assert store.remove(gone, {"w": value}).values.get("w", value).tolist() == [tasks + repairs, repairs]
    store.apply(store.remove([0], {"w": value}))
    store.record_repair({"w": value}, {"w": value + 1}, [2])
    assert store.repairs == {-2: {1, 2}, -3: {3}, -4: {2}}
    with pytest.raises(TrajectoryError, match="negative numbers are those of repairs"):
        store.record(-5, {"w": value}, {"w": value + 1})
