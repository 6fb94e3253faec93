"""Shadow copies replace an unlearned task, never change earlier tasks and keep no part of it."""

import copy
from functools import cache, partial

import pytest
import torch
from support import strategy_state as states
from support.fault_injection import raiser
from support.strategies import DIGITS, accuracy, amnesiac, batch_normed, learn, trained
from torch import nn

from avalanche_amnesia import TrajectoryPlugin, UnlearningPlugin, UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.contrib.shadows.shadow import Shadow, entries_first_used, entries_in_use
from experiments.published_copies import PublishedCopies

PERMUTED = PermutedDigits(4, n_train=600, n_test=300)
TEST = PERMUTED.test_stream
ADJUSTMENTS = ["hat", "adahat"]


learned = partial(trained, stream=PERMUTED, train_epochs=2, compensation=BackupPlugin)


@cache
def trained_once(adjustment, dtype=None, kind=BackupPlugin):
    return learned(4, adjustment=adjustment, trajectory=TrajectoryPlugin(dtype=dtype), compensation=kind)


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
def test_shadow_copies_improve_affected_tasks(adjustment):
    plain, ours = (learned(3, compensation=c, adjustment=adjustment, train_epochs=5) for c in ("none", BackupPlugin))
    plain.unlearn([0])
    record = ours.unlearn([0])
    assert record.plan.compensated == record.affected == (1, 2)
    assert sum(accuracy(ours, TEST[t]) for t in (1, 2)) > sum(accuracy(plain, TEST[t]) for t in (1, 2)) + 0.1


@pytest.mark.parametrize(("net", "optimizer"), [("mlp", "momentum"), ("conv", "adam")])
def test_detached_shadows_do_not_change_the_main_training(net, optimizer):
    def dropped_out():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 16), nn.ReLU())

    options = {"net": batch_normed if net == "conv" else dropped_out, "optimizer": optimizer, "stream": DIGITS}
    with_shadows, without = learned(3, **options), learned(3, compensation="none", **options)
    assert states.bits(with_shadows.model) == states.bits(without.model)


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
def test_entries_of_earlier_tasks_are_those_after_a_plain_deletion(adjustment):
    plain = learned(4, compensation="none", adjustment=adjustment)
    ours = copy.deepcopy(trained_once(adjustment))
    before = {task: entries_in_use(ours.model, task) for task in (0, 1)}
    logits = ours.model.eval()(task_data(TEST[0])[0], 0)
    region = entries_first_used(ours.model, 2, [0, 1])
    plain.unlearn([2])
    ours.unlearn([2])
    a, b = states.values(plain.model.backbone), states.values(ours.model.backbone)
    for name in a:
        of_earlier = before[0][name] | before[1][name]
        assert bool(of_earlier.any())
        assert same_bits(a[name], b[name])[of_earlier].all()
        assert same_bits(a[name], b[name])[~region[name]].all()
    assert any(not torch.equal(a[name], b[name]) for name in a)
    if adjustment == "hat":
        assert torch.equal(logits, ours.model.eval()(task_data(TEST[0])[0], 0))


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
def test_overlapping_entries_come_from_the_last_task(adjustment):
    """With AdaHAT, updates of tasks in between are dropped."""
    strategy = copy.deepcopy(trained_once(adjustment))
    plugin, kept_values = states.backups(strategy), states.values(strategy.model.backbone)
    initial = {
        n: states.trajectory(strategy).values_before(0, {f"backbone.{n}": v})[f"backbone.{n}"]
        for n, v in kept_values.items()
    }
    kept = plugin.kept
    strategy.unlearn([0])
    overlaps = 0
    for name, value in states.values(strategy.model.backbone).items():
        ours, other = kept[3][0].updates[name], kept[1][0].updates[name]
        assert torch.equal(value[ours.where], (initial[name][ours.where].double() + ours.values.double()).float())
        overlaps += int((ours.where & other.where).sum())
    assert overlaps > 0


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
@pytest.mark.parametrize(("kind", "dtype"), [(BackupPlugin, None), (BackupPlugin, torch.int8), (PublishedCopies, None)])
@pytest.mark.parametrize("requests", [[[0], [1], [2], [3]], [[1], [3, 0], [2]], [[2], [0], [1, 3]]])
def test_unused_entries_have_their_initial_values_after_any_requests(adjustment, kind, dtype, requests):
    strategy = copy.deepcopy(trained_once(adjustment, dtype, kind))
    states.assert_requests_leave_nothing_stray(strategy, states.initial_values(amnesiac().model), requests)
    assert not any(bool(entries.any()) for entries in states.owned(strategy.model).values())
    assert states.backups(strategy).kept == getattr(states.backups(strategy), "placed", {}) == {}


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
def test_a_shadow_does_not_depend_on_the_task_that_it_replaces(monkeypatch, adjustment):
    """Compare one step of a later task with and without a mark in an earlier task's update."""
    seen, logits = [], Shadow.logits

    def watched(self, x):
        seen.append({name: value.detach().clone() for name, value in self._weights().items()})
        return logits(self, x)

    updates = []
    for size in (0.0, 0.25):
        strategy = learned(2, adjustment=adjustment)
        states.mark(strategy, 1, size)
        monkeypatch.setattr(Shadow, "logits", watched)
        strategy.train_epochs, strategy.train_mb_size = 1, 600
        strategy.train(PERMUTED.train_stream[2])
        monkeypatch.setattr(Shadow, "logits", logits)
        updates.append(states.backups(strategy).kept[2][1].updates)
    of_0, of_1, marked_of_0, marked_of_1 = seen
    tolerance = 0 if adjustment == "hat" else 1e-6
    assert all(torch.allclose(of_1[name], marked_of_1[name], rtol=0, atol=tolerance) for name in of_1)
    assert any(not torch.allclose(of_0[name], marked_of_0[name]) for name in of_0)  # of task 0 alone it is kept free
    for name, learned_ in updates[0].items():
        both = learned_.where & updates[1][name].where  # the main training sees the mark, and so may the mask
        a, b = (u.values[both[u.where]] for u in (learned_, updates[1][name]))
        assert torch.allclose(a, b, rtol=0, atol=100 * tolerance)
    assert sum(int(u.where.sum()) for u in updates[0].values()) > 0


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
@pytest.mark.parametrize("kind", [BackupPlugin, PublishedCopies])
@pytest.mark.parametrize("requests", [[[1], [2]], [[2], [1]], [[1, 2]], [[0], [2]], [[2], [0]], [[0], [1]]])
def test_the_coefficient_of_a_forgotten_update_is_zero(adjustment, kind, requests):
    """Each forgotten task's update is marked after training; no mark may be left in anything that remains."""
    plain, marked = (copy.deepcopy(trained_once(adjustment, kind=kind)) for _ in range(2))
    for request in requests:
        for task in request:
            states.mark(marked, task)
    states.assert_marks_go(plain, marked, requests)
    remaining = states.unlearning_plugin(plain).ledger.remaining
    for task in remaining:  # nor does it come back from the logs
        for strategy in (plain, marked):
            strategy.unlearn([task])
    assert states.bits(plain.model) == states.bits(marked.model)


def test_a_request_during_a_task_drops_its_shadows():
    requests = [UnlearningRequest((1,), at=2, when="iteration", iteration=7), UnlearningRequest((0,), at=3)]
    benchmark = with_unlearning(PERMUTED, requests)
    strategy = amnesiac(compensation=BackupPlugin(), adjustment="adahat", train_epochs=1)
    initial = states.initial_values(strategy.model)
    learn(strategy, benchmark.train_stream[:3])
    plugin = states.backups(strategy)
    assert {task: set(of_task) for task, of_task in plugin.kept.items()} == {0: set(), 2: set()}
    assert plugin._now is None
    strategy.train(benchmark.train_stream[3])
    assert states.unlearning_plugin(strategy).records[-1].plan.compensated == (3,)
    assert states.stray(strategy.model, initial) == []


def test_shadows_of_permanent_tasks_are_dropped():
    strategy = learned(4, unlearning=UnlearningPlugin(deadline=2), train_epochs=1)
    assert {task: [*of] for task, of in states.backups(strategy).kept.items()} == {0: [], 1: [], 2: [], 3: [2]}
    strategy.unlearn([2])
    assert {task: [*of] for task, of in states.backups(strategy).kept.items()} == {0: [], 1: [], 3: []}


def test_norms_of_a_shadow_are_used_and_removed_with_their_task():
    plain, ours = (learned(2, stream=DIGITS, net=batch_normed, compensation=c) for c in ("none", BackupPlugin))
    state = states.backups(ours).kept[1][0].parts
    kept_before = states.bits(ours.model)
    plain.unlearn([0])
    ours.unlearn([0])
    own = ours.model.task_parts(1).state_dict()
    assert {name for name, value in own.items() if value.dim()} == {n for n, v in state.items() if v.dim()}
    assert all(torch.equal(own[name], value) for name, value in state.items())
    assert any(kept_before[f"heads.1.own.{name}"] != states.bits(ours.model)[f"heads.1.own.{name}"] for name in state)
    ours.unlearn([1])
    assert states.backups(ours).kept == {}
    assert not any(name.startswith("heads.1.own") for name in states.bits(ours.model))


def test_a_failed_unlearning_restores_shadows_and_norms(monkeypatch):
    strategy = learned(3, stream=DIGITS, net=batch_normed, train_epochs=1)
    plugin = states.backups(strategy)
    before, kept = states.fingerprint(strategy), plugin.kept
    with monkeypatch.context() as patch:
        patch.setattr(states.unlearning_plugin(strategy).ledger, "forget", raiser(MemoryError))
        with pytest.raises(MemoryError, match="injected"):
            strategy.unlearn([1])
    assert states.fingerprint(strategy) == before
    assert plugin.kept is kept
    assert strategy.unlearn([1]).plan.compensated == (2,)


def test_an_interrupted_training_leaves_no_shadow(monkeypatch):
    strategy = learned(1)
    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "step", lambda self: (_ for _ in ()).throw(MemoryError("injected")))
        with pytest.raises(MemoryError, match="injected"):
            strategy.train(PERMUTED.train_stream[1])
    assert states.backups(strategy)._now.shadows
    strategy.abort_training()
    assert states.backups(strategy)._now is None
    other = learned(1)
    for s in (strategy, other):
        s.train(PERMUTED.train_stream[1])
    assert states.bits(strategy.model) == states.bits(other.model)


def test_a_relearned_task_has_shadows_of_earlier_tasks():
    strategy = learned(3, train_epochs=1)
    strategy.unlearn([0])
    strategy.train(PERMUTED.train_stream[0])
    assert set(states.backups(strategy).kept[0]) <= {1, 2}
    assert strategy.unlearn([1]).plan.compensated


def test_a_tensor_changed_only_by_the_shadow_is_revised():
    """SGD does not change a bias before BatchNorm, but rounding may change the shadow's."""
    strategy = learned(2, stream=DIGITS, net=batch_normed)
    name = "backbone.0.bias"
    logs = dict(states.trajectory(strategy).logs)
    logs[0] = logs[0].with_entries({n: e for n, e in logs[0].items() if n != name})
    states.trajectory(strategy).logs = logs
    assert name.removeprefix("backbone.") in states.backups(strategy).kept[1][0].updates
    assert strategy.unlearn([0]).plan.compensated == (1,)
