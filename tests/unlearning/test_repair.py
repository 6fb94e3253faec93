"""Repair of affected tasks: it helps, moves nothing else by a bit, and nothing of it outlives the next request."""

import copy
import functools
from itertools import permutations

import pytest
import torch
from avalanche.training.plugins import EWCPlugin
from torch import nn
from unlearning_kit import amnesiac, bits, book, fingerprint, initial_values, stock, stray, trajectory

from avalanche_amnesia.benchmarks import PermutedDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.training import CounterfactualPlugin, DivergedError, RepairPlugin, TrajectoryPlugin
from avalanche_amnesia.training.plugins import find_plugin
from avalanche_amnesia.training.plugins.seeding import _rng_state
from avalanche_amnesia.unlearning import Trajectory, TrajectoryError
from avalanche_amnesia.unlearning.trajectory import REPAIR

PERMUTED = PermutedDigits(4, n_train=600, n_test=300)
MODES = ["joint", "sequential", "sequential_adahat"]


@functools.cache
def _trained(repair, **options):
    strategy = amnesiac(**{"train_epochs": 4, "compensation": "none", "repair": repair, **options})
    for experience in PERMUTED.train_stream:
        strategy.train(experience)
    return strategy


def trained(repair="none", **options):
    """A strategy that has learned four tasks, to be changed at will."""
    return copy.deepcopy(_trained(repair, **options))


def plugin_of(strategy):
    return find_plugin(strategy, RepairPlugin)


@torch.no_grad()
def logits(strategy, task):
    strategy.model.eval()
    return strategy.model(task_data(PERMUTED.test_stream[task])[0], task)


def accuracy(strategy, task):
    y = task_data(PERMUTED.test_stream[task])[1]
    return float((logits(strategy, task).argmax(1) == y).double().mean())


def values(strategy):
    return {name: p.detach().clone() for name, p in strategy.model.named_parameters()}


def own_names(strategy, tasks):
    return {
        n for n in values(strategy) if n.startswith(tuple(f"{kind}.{t}." for kind in ("heads", "own") for t in tasks))
    }


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_outside_the_overlap_moves_by_a_bit(optimizer, mode):
    plain, ours = trained(optimizer=optimizer), trained(mode, optimizer=optimizer)
    before = values(plain)
    assert all(same_bits(before[name], value).all() for name, value in values(ours).items())
    plain.unlearn([1])
    untouched = logits(plain, 0)
    record = ours.unlearn([1])
    assert record.plan.repaired == record.affected == (2, 3)
    assert same_bits(logits(ours, 0), untouched).all()
    model = ours.model
    use, of_others = (model.graph.parameter_use(*(model.masks[t] for t in tasks)) for tasks in ((2, 3), (0,)))
    after, own = values(ours), own_names(ours, (2, 3))
    moved_at_all = 0
    for name, value in values(plain).items():
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


@pytest.mark.parametrize("mode", MODES)
def test_earlier_tasks_that_got_their_entries_back_keep_them(mode):
    plain, ours = trained(adjustment="adahat"), trained(mode, adjustment="adahat")
    assert plain.unlearn([1]).affected == (0, 2, 3)  # task 1 had moved what task 0 reads
    record = ours.unlearn([1])
    assert record.plan.repaired == (2, 3)
    assert sum(record.repair.entries.values()) > 0
    assert same_bits(logits(ours, 0), logits(plain, 0)).all()


def batch_normed():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    )


def test_norms_of_affected_tasks_are_repaired_and_those_of_others_are_left():
    plain, ours = (trained(repair, net=batch_normed, optimizer="adamw") for repair in ("none", "joint"))
    affected = plain.unlearn([1]).affected
    assert ours.unlearn([1]).plan.repaired == affected
    a, b = plain.model.state_dict(), ours.model.state_dict()
    moved = {name for name in a if not same_bits(a[name], b[name]).all()}
    of_affected = tuple(f"{kind}.{task}." for kind in ("heads", "own") for task in affected)
    assert all(name.startswith(("backbone.", *of_affected)) for name in moved)
    assert any(name.endswith("running_mean") for name in moved)
    assert same_bits(logits(ours, 0), logits(plain, 0)).all()
    assert sum(accuracy(ours, t) for t in affected) > sum(accuracy(plain, t) for t in affected) + 0.1
    columns = ours.model.by_layer(ours.model.binary_mask(3))["4"]  # decay does not move what the task never reads
    closed = (~columns).repeat_interleave(4)
    assert bool(closed.any())
    assert same_bits(a["heads.3.weight"][:, closed], b["heads.3.weight"][:, closed]).all()


@pytest.mark.parametrize("mode", MODES)
def test_affected_tasks_gain_on_data_that_the_repair_never_saw(mode):
    plain, ours = trained(), trained(mode)
    affected = plain.unlearn([1]).affected
    record = ours.unlearn([1])
    assert record.repair.samples == {2: 50, 3: 50}
    assert record.repair.steps == (50 if mode == "joint" else 100)
    assert '"repair": {' in record.to_json()
    assert sum(accuracy(ours, t) for t in affected) > sum(accuracy(plain, t) for t in affected) + 0.1


def test_beside_counterfactual_heads_it_keeps_what_they_gained():
    heads, both = (trained(repair, compensation="counterfactual", train_epochs=12) for repair in ("none", "joint"))
    affected = heads.unlearn([1]).affected
    assert both.unlearn([1]).plan.compensated == affected
    assert sum(accuracy(both, t) for t in affected) > sum(accuracy(heads, t) for t in affected) - 0.02
    older = plugin_of(trained("joint", compensation="counterfactual", train_epochs=12)).memory.samples[2]
    stored = plugin_of(both).memory.samples[2]  # what saw task 1 gave way to the logits of the head that did not
    assert torch.equal(stored.x, older.x)
    with torch.no_grad():
        distances = [(both.model(s.x, 2) - s.logits).square().mean() for s in (stored, older)]
    assert distances[0] < distances[1] / 10


def test_sequentially_each_task_holds_what_the_former_read(monkeypatch):
    for mode, holds in (("sequential", True), ("sequential_adahat", False)):
        strategy = trained(RepairPlugin(mode, alpha=1.0))
        seen, train = [], RepairPlugin._train

        def watch(self, model, *args, train=train, seen=seen, strategy=strategy):
            train(self, model, *args)
            seen.append(logits(strategy, 1))

        with monkeypatch.context() as patch:
            patch.setattr(RepairPlugin, "_train", watch)
            assert strategy.unlearn([0]).plan.repaired == (1, 2, 3)
        assert [bool(same_bits(later, seen[0]).all()) for later in seen[1:]] == [holds, holds]


@pytest.mark.parametrize("compensation", ["none", "counterfactual"])
def test_the_next_request_finds_nothing_of_a_repair(monkeypatch, compensation):
    plain, ours = trained(compensation=compensation), trained("joint", compensation=compensation)
    for gone in ([1], [2], [0]):
        plain.unlearn(gone)
        found, repair = [], RepairPlugin.repair

        def look(self, model, *args, repair=repair, found=found):
            found.append(bits(model))
            return repair(self, model, *args)

        with monkeypatch.context() as patch:
            patch.setattr(RepairPlugin, "repair", look)
            record = ours.unlearn(gone)
        assert found == [bits(plain.model)]
        assert record.repair.steps == 50
        assert bits(ours.model) != bits(plain.model)
    assert trajectory(ours).tasks == (3,)


def test_a_second_request_that_touches_no_repaired_task_repeats_the_repair_bit_for_bit():
    strategy = trained("joint")
    strategy.unlearn([0, 3])
    first = bits(strategy.model)
    strategy.train(PERMUTED.train_stream[3])
    assert strategy.unlearn([3]).plan.repaired == (1, 2)
    assert bits(strategy.model) == first


@pytest.mark.parametrize("repair", MODES)
def test_all_tasks_gone_leave_the_initial_bits(repair):
    torch.manual_seed(0)
    initial = initial_values(amnesiac().model)
    for order in ([[0], [2], [1], [3]], [[1], [0, 3], [2]], [[2], [0, 1, 3]]):
        strategy = trained(repair)
        for gone in order:
            strategy.unlearn(gone)
            assert stray(strategy.model, initial) == []
            assert sorted(plugin_of(strategy).memory.samples) == list(trajectory(strategy).tasks)
        assert trajectory(strategy).logs == {}
        assert all(torch.equal(p, initial[name]) for name, p in strategy.model.backbone.named_parameters())


def test_what_nothing_was_built_on_goes_exactly_and_needs_no_repair():
    for adjustment in ("hat", "adahat"):  # adahat: earlier tasks read what the last one moved, and get it back
        strategy = trained("joint", adjustment=adjustment)
        record = strategy.unlearn([3])
        assert (record.claim, record.repair, record.plan.repaired) == ("exact", None, ())
        assert 3 not in plugin_of(strategy).memory.samples
    assert record.affected == (0, 1, 2)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("standing", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("where", ["step", "behind"])
def test_an_error_in_the_middle_leaves_everything(monkeypatch, error, standing, where):
    strategy = amnesiac(net=batch_normed, compensation="counterfactual", repair="sequential", train_epochs=1)
    for experience in PERMUTED.train_stream:
        strategy.train(experience)
    if standing:
        strategy.unlearn([0])
    plugin, loss = plugin_of(strategy), RepairPlugin._loss

    def state():
        samples = {t: (s.x, s.y, s.logits) for t, s in plugin.memory.samples.items()}
        grads = [(p.requires_grad, p.grad) for p in strategy.model.parameters()]
        modes = [module.training for module in strategy.model.modules()]
        random = [part.tolist() if isinstance(part, torch.Tensor) else str(part) for part in _rng_state()]
        return fingerprint(strategy, samples), str(grads), modes, random

    def fail(self, *args, calls=[]):  # noqa: B006 - counts its calls
        calls.append(1)
        torch.rand(1)
        if len(calls) == 60:
            raise error("injected")
        return loss(self, *args)

    before = state()
    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(RepairPlugin, "_loss", fail)
        else:
            patch.setattr(book(strategy).ledger, "forget", lambda *a, **k: (_ for _ in ()).throw(error("injected")))
        with pytest.raises(error, match="injected"):
            strategy.unlearn([1])
    assert state() == before
    assert strategy.unlearn([1]).plan.repaired == (2, 3)


def test_a_repair_that_diverges_is_an_error_and_nothing_is_unlearned():
    strategy = trained(RepairPlugin(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30)))
    before = fingerprint(strategy)
    with pytest.raises(DivergedError, match=r"the repair of tasks \[2, 3\] diverged"):
        strategy.unlearn([1])
    assert fingerprint(strategy) == before


def test_memory_is_a_uniform_sample_of_remaining_tasks_and_shrinks_to_a_common_size():
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


def test_training_does_not_notice_the_memory():
    assert bits(trained().model) == bits(trained("joint").model)


@pytest.mark.parametrize("adjustment", ["hat", "adahat"])
@pytest.mark.parametrize("compensation", ["none", "counterfactual"])
def test_a_request_in_the_middle_of_a_task_repairs_the_values_before_it(adjustment, compensation):
    benchmark = with_unlearning(PERMUTED, [UnlearningRequest((0,), 3, "iteration", 20)])
    options = {"train_epochs": 3, "adjustment": adjustment, "compensation": compensation}
    strategy, plain = (amnesiac(repair=repair, **options) for repair in ("joint", "none"))
    for s in (strategy, plain):
        for experience in benchmark.train_stream:
            s.train(experience)
    (record,) = book(strategy).records
    assert record.plan.repaired == (1, 2)
    assert not {name for name in trajectory(strategy).logs[3] if name.startswith("heads.")}
    strategy.unlearn([3])  # takes the repair out, and brings no older head back
    plain.unlearn([3])
    stored = trajectory(strategy).remove((), values(strategy))
    without = values(strategy) | dict(stored.values)
    assert all(same_bits(value, without[name]).all() for name, value in values(plain).items() if "heads" in name)
    strategy.unlearn([1, 2])
    initial = initial_values(amnesiac().model)
    assert all(torch.equal(p, initial[name]) for name, p in strategy.model.backbone.named_parameters())


def test_an_interrupted_training_keeps_the_repair_made_in_its_middle():
    class Stops(RepairPlugin):
        def before_update(self, strategy, **kwargs):
            if book(strategy).records:
                raise KeyboardInterrupt

    benchmark = with_unlearning(PERMUTED, [UnlearningRequest((0,), 2, "iteration", 5)])
    strategy = amnesiac(train_epochs=2, repair=Stops())
    for experience in benchmark.train_stream[:2]:
        strategy.train(experience)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[2])
    strategy.abort_training()
    between = amnesiac(train_epochs=2, repair="joint")
    for experience in PERMUTED.train_stream[:2]:
        between.train(experience)
    between.unlearn([0])
    assert bits(strategy.model) == bits(between.model)


def test_a_task_learned_on_a_repair_has_a_head_for_the_world_without_it():
    strategy = amnesiac(train_epochs=4, repair="joint")
    for experience in PERMUTED.train_stream[:3]:
        strategy.train(experience)
    strategy.unlearn([0])
    strategy.mark_permanent([1])
    strategy.train(PERMUTED.train_stream[3])
    assert set(find_plugin(strategy, CounterfactualPlugin).heads[3]) >= {frozenset()}
    assert 3 in strategy.plan_unlearning([2]).compensated


def test_an_anchor_stored_while_a_repair_stood_is_freed_of_it():
    strategy = amnesiac(train_epochs=1, repair="joint", plugins=[EWCPlugin(0.0)])
    for experience in PERMUTED.train_stream[:3]:
        strategy.train(experience)
    strategy.unlearn([0])
    standing = trajectory(strategy).moved_by_repair()
    strategy.train(PERMUTED.train_stream[3])
    strategy.unlearn([1])  # the repair was made with its data too
    anchors = find_plugin(strategy, EWCPlugin).saved_params
    without = trajectory(strategy).remove((), values(strategy)).values
    for name, where in standing.items():
        if name.startswith("backbone."):
            now = without.get(name, values(strategy)[name])
            torch.testing.assert_close(anchors[max(anchors)][name].data[where], now[where], rtol=0, atol=1e-6)


def test_options_that_are_not_allowed_are_refused():
    for options in ({"steps": 0}, {"batch_size": 1.5}, {"samples_per_task": 0}, {"size": 0}):
        with pytest.raises(ValueError, match="int of at least 1"):
            RepairPlugin(**options)
    with pytest.raises(ValueError, match="weights of at least 0"):
        RepairPlugin(logits=0.0, labels=0.0)
    with pytest.raises(ValueError, match="mode must be one of"):
        RepairPlugin("all")
    with pytest.raises(ValueError, match="repair must be one of 'none', 'joint'"):
        amnesiac(repair="all")
    with pytest.raises(TypeError, match="model with masks"):
        stock(plugins=[RepairPlugin()]).train(PERMUTED.train_stream[0])


# In the trajectory ------------------------------------------------------------------------------------------------


def test_no_marked_part_of_a_forgotten_update_comes_back():
    """Updates are powers of two: a value tells which tasks, and how much of a repair, are in it."""
    for gone in permutations(range(4), 3):
        store, value = Trajectory(), torch.zeros(3)
        for task in range(4):
            before, value = value, value + torch.tensor([2.0**task, 2.0**task, 0.0 if task % 2 else 2.0**task])
            store.record(task, {"w": before}, {"w": value})
        left = set(range(4))
        for round_, task in enumerate(gone):
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
    "options", [{}, {"dtype": torch.int8}, {"threshold": 0.3}], ids=["lossless", "int8", "threshold"]
)
def test_a_repair_is_taken_out_bit_for_bit_whatever_the_tasks_logs_are_like(tmp_path, options):
    generator = torch.Generator().manual_seed(0)
    store, value = Trajectory(path=tmp_path, **options), torch.randn(6, 5, generator=generator)
    for task in range(2):
        after = value + torch.randn(6, 5, generator=generator)
        value = store.record(task, {"w": value}, {"w": after}).get("w", after)
    repaired = value.clone()
    repaired[::2] += torch.randn(3, 5, generator=generator)
    store.record_repair({"w": value}, {"w": repaired})
    with pytest.raises(TrajectoryError, match="a repair is recorded already"):
        store.record_repair({"w": value}, {"w": repaired})
    store = Trajectory(path=tmp_path, **options)
    assert store.tasks == (0, 1)
    assert list(store.report().index) == [0, 1]
    assert store.nbytes() > store.nbytes(0) + store.nbytes(1)
    assert store.moved_by_repair()["w"].sum() == 15
    assert same_bits(store.remove((), {"w": repaired}).values["w"], value).all()
    twin = Trajectory(path=None, **options)
    twin.restore({task: log for task, log in store.logs.items() if task != REPAIR})
    for gone in ([0], [1]):
        assert same_bits(
            store.remove(gone, {"w": repaired}).values["w"], twin.remove(gone, {"w": value}).values["w"]
        ).all()


def test_it_works_on_disk_with_coded_updates_and_merged_permanent_tasks(tmp_path):
    recorder = TrajectoryPlugin(path=tmp_path, dtype=torch.int8, merge_permanent=True)
    strategy = amnesiac(train_epochs=2, repair="joint", trajectory=recorder)
    strategy.train(PERMUTED.train_stream[0])
    strategy.train(PERMUTED.train_stream[1])
    strategy.unlearn([0])
    strategy.mark_permanent([1])
    for experience in PERMUTED.train_stream[2:]:
        strategy.train(experience)
    assert strategy.unlearn([2]).plan.repaired
    assert sorted(plugin_of(strategy).memory.samples) == [1, 3]
    assert REPAIR in Trajectory(path=tmp_path).logs
    strategy.unlearn([3])
    assert trajectory(strategy).tasks == (1,)
