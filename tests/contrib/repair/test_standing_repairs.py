"""Repairs and later tasks, requests and records: the next request removes every repair."""

from itertools import permutations

import pytest
import torch
from support.fault_injection import FailsAtEvent
from support.repaired_strategies import PERMUTED, plugin_of, trained
from support.strategies import amnesiac, learn
from support.strategy_state import bits, initial_values, stray, trajectory, unlearning_plugin, values

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.log_files import TrajectoryError


def test_the_next_request_starts_from_values_without_the_repair(monkeypatch):
    plain, ours = trained(compensation="counterfactual"), trained("joint", compensation="counterfactual")
    for request in ([1], [2]):
        plain.unlearn(request)
        found, repair = [], RepairPlugin.repair

        def look(self, model, *args, repair=repair, found=found):
            found.append(bits(model))
            return repair(self, model, *args)

        with monkeypatch.context() as patch:
            patch.setattr(RepairPlugin, "repair", look)
            record = ours.unlearn(request)
        assert found == [bits(plain.model)]
        assert record.repair.steps == 50
        assert bits(ours.model) != bits(plain.model)
    assert trajectory(ours).tasks == (0, 3)


def test_unlearning_all_tasks_restores_the_initial_bits():
    initial = initial_values(amnesiac().model)
    for order in ([[0], [2], [1], [3]], [[1], [0, 3], [2]]):
        strategy = trained("joint")
        for request in order:
            strategy.unlearn(request)
            assert stray(strategy.model, initial) == []
            assert sorted(plugin_of(strategy).memory.samples) == list(trajectory(strategy).tasks)
        assert trajectory(strategy).logs == {}
        assert all(torch.equal(p, initial[name]) for name, p in strategy.model.backbone.named_parameters())


def test_a_request_during_a_task_repairs_the_values_before_the_task():
    benchmark = with_unlearning(PERMUTED, [UnlearningRequest((0,), 3, "iteration", 20)])
    options = {"train_epochs": 3, "adjustment": "adahat", "compensation": "counterfactual"}
    strategy, plain = (amnesiac(repair=repair, **options) for repair in (RepairPlugin, None))
    for s in (strategy, plain):
        learn(s, benchmark.train_stream)
    (record,) = unlearning_plugin(strategy).records
    assert record.plan.repaired == (1, 2)
    assert not {name for name in trajectory(strategy).logs[3] if name.startswith("heads.")}
    strategy.unlearn([3])  # removes the repair and restores no older head
    plain.unlearn([3])
    stored = trajectory(strategy).remove((), values(strategy.model))
    without = values(strategy.model) | dict(stored.values)
    assert all(same_bits(value, without[name]).all() for name, value in values(plain.model).items() if "heads" in name)
    strategy.unlearn([1, 2])
    initial = initial_values(amnesiac().model)
    assert all(torch.equal(p, initial[name]) for name, p in strategy.model.backbone.named_parameters())


def test_an_interrupted_training_keeps_a_repair_made_during_it():
    class Stops(RepairPlugin):
        def before_update(self, strategy, **kwargs):
            if unlearning_plugin(strategy).records:
                raise KeyboardInterrupt

    benchmark = with_unlearning(PERMUTED, [UnlearningRequest((0,), 2, "iteration", 5)])
    strategy = learn(amnesiac(train_epochs=2, repair=Stops()), benchmark.train_stream[:2])
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[2])
    strategy.abort_training()
    between = learn(amnesiac(train_epochs=2, repair=RepairPlugin()), PERMUTED.train_stream[:2])
    between.unlearn([0])
    assert bits(strategy.model) == bits(between.model)


def test_a_repair_is_kept_if_a_recorded_task_is_aborted():
    fails = FailsAtEvent(error=MemoryError)
    strategy = learn(amnesiac(train_epochs=2, repair=RepairPlugin(), plugins=[fails]), PERMUTED.train_stream[:3])
    strategy.unlearn([0])
    before, logs, fails.event = bits(strategy.model), trajectory(strategy).logs, "after_training_exp"
    with pytest.raises(MemoryError, match="injected"):
        strategy.train(PERMUTED.train_stream[3])
    strategy.abort_training()
    assert bits(strategy.model) == before
    assert trajectory(strategy).logs == logs


def test_no_part_of_an_unlearned_update_returns():
    """Updates are powers of two: each value shows its tasks and repairs."""
    for order in permutations(range(4), 3):
        store, value = Trajectory(), torch.zeros(3)
        for task in range(4):
            before, value = value, value + torch.tensor([2.0**task, 2.0**task, 0.0 if task % 2 else 2.0**task])
            store.record(task, {"w": before}, {"w": value})
        left = set(range(4))
        for round_, task in enumerate(order):
            removal = store.remove([task], {"w": value})
            store.apply(removal)
            value = removal.values.get("w", value)
            left -= {task}
            total = sum(2.0**t for t in left)
            assert value.tolist() == [total, total, sum(2.0**t for t in left if t % 2 == 0)]
            repaired = value + torch.tensor([0.5 / 2**round_, 0.0, 0.25])
            store.record_repair({"w": value}, {"w": repaired})
            value = repaired
            assert store.tasks == tuple(sorted(left))


@pytest.mark.parametrize(
    ("options", "threshold"),
    [({"dtype": torch.int8}, 0.0), ({}, 0.3)],
    ids=["int8", "threshold"],
)
def test_a_repair_is_removed_bit_for_bit_with_any_kind_of_log(tmp_path, options, threshold):
    generator = torch.Generator().manual_seed(0)
    store, value = Trajectory(path=tmp_path, **options), torch.randn(6, 5, generator=generator)
    for task in range(2):
        after = value + torch.randn(6, 5, generator=generator)
        after = torch.where((after - value).abs() < threshold, value, after)  # like PrunedTrajectoryPlugin
        value = store.record(task, {"w": value}, {"w": after}).get("w", after)
    repaired = value.clone()
    repaired[::2] += torch.randn(3, 5, generator=generator)
    store.record_repair({"w": value}, {"w": repaired})
    with pytest.raises(TrajectoryError, match="a repair is recorded already"):
        store.record_repair({"w": value}, {"w": repaired})
    store = Trajectory(path=tmp_path, **options)
    assert store.tasks == (0, 1)
    assert list(store.report()) == [0, 1]
    assert store.nbytes() > store.nbytes(0) + store.nbytes(1)
    assert store.moved_with(())["w"].sum() == 15
    assert same_bits(store.remove((), {"w": repaired}).values["w"], value).all()
    twin = Trajectory(path=None, **options)
    twin.restore({task: log for task, log in store.logs.items() if task >= 0})
    for gone in ([0], [1]):
        assert same_bits(
            store.remove(gone, {"w": repaired}).values["w"], twin.remove(gone, {"w": value}).values["w"]
        ).all()


def test_a_repair_is_removed_with_the_tasks_of_its_samples(tmp_path):
    """Updates are powers of two; the log is on disk."""
    store, value = Trajectory(path=tmp_path / "logs"), torch.zeros(2)
    for task in range(4):
        before, value = value, value + torch.tensor([2.0**task, 0.0])
        store.record(task, {"w": before}, {"w": value})
    for part, tasks in ((0.5, [0, 1]), (0.25, [1, 2]), (0.125, [3])):
        before, value = value, value + part
        store.record_repair({"w": before}, {"w": value}, tasks)
    for stored in (store, Trajectory(path=tmp_path / "logs")):
        assert stored.tasks == (0, 1, 2, 3)
        assert stored.repairs == {-1: {0, 1}, -2: {1, 2}, -3: {3}}
        assert stored.values_before(3, {"w": value})["w"].tolist() == [7, 0]
        for gone, tasks, repairs in (([0], 14, 0.375), ([1], 13, 0.125), ([2, 3], 3, 0.5), ([], 15, 0.875)):
            new = stored.remove(gone, {"w": value}).values.get("w", value)
            assert new.tolist() == [tasks + repairs, repairs]
    store.apply(store.remove([0], {"w": value}))
    store.record_repair({"w": value}, {"w": value + 1}, [2])
    assert store.repairs == {-2: {1, 2}, -3: {3}, -4: {2}}
    with pytest.raises(TrajectoryError, match="negative numbers are those of repairs"):
        store.record(-5, {"w": value}, {"w": value + 1})
