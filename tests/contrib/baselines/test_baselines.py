"""Baselines show the behaviour for which they were published; their memory and the loss of DER++."""

from dataclasses import replace

import pytest
import torch
from avalanche.training import Replay
from support.fault_injection import FailsAtEvent
from support.strategies import WRAPS, accuracy, amnesiac, learn, logits, make, quiet, stock
from support.strategy_state import bits, stray, trajectory, unlearning_plugin, values
from torch.nn import functional as F
from torch.optim import Adam

from avalanche_amnesia import MLP, References, UnlearningPlugin, UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent
from avalanche_amnesia.contrib.baselines.clpu import CLPUPlugin
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss, DarkReplayPlugin, TaskMemory
from avalanche_amnesia.contrib.baselines.pall import PALLPlugin
from avalanche_amnesia.models import MultiHeadModel
from avalanche_amnesia.training.host.lookup import find_plugin

STREAM = PermutedDigits(4, n_train=300, n_test=150)
TEST = STREAM.test_stream
RIVALS = [Independent, CLPUDERpp, PALL]


def rival(kind, **options):
    options |= {"score_lr": 1e-2} if kind is PALL else {}
    options = {"train_mb_size": 25, "train_epochs": 4, "evaluator": quiet(), **options}
    return make(kind, hidden=(48,), features=32, **options)


@pytest.mark.parametrize(("kind", "permanent"), [(Independent, [0]), (CLPUDERpp, [0, 2, 3])])
def test_deleting_a_network_equals_retraining_bit_for_bit(kind, permanent):
    benchmark = with_unlearning(STREAM, [UnlearningRequest((1,), 2, "before")], permanent=permanent)
    strategy = learn(rival(kind), benchmark.train_stream)
    record = unlearning_plugin(strategy).records[0]
    assert record.claim == "exact"
    assert all(name.startswith("heads.1.") for name in record.plan.removed)
    reference = References(lambda **options: rival(kind, **options), benchmark).reference([0, 2, 3])
    assert bits(strategy.model) == bits(reference)
    assert {id(p) for g in strategy.optimizer.param_groups for p in g["params"]} == set(
        map(id, strategy.model.parameters())
    )


@pytest.mark.parametrize("kind", [Independent, CLPUDERpp])
def test_parameters_of_a_tasks_network_are_in_the_groups_of_the_backbones(kind):
    frozen = rival(kind, optimizer=lambda of: Adam([{"params": [next(of)]}, {"params": [*of], "lr": 0.0}], lr=1e-2))
    model = learn(frozen, STREAM, 1).model
    networks = model.backbone.parameters(), model.network(0).parameters()
    moved = [not torch.equal(*pair) for pair in zip(*networks, strict=True)]
    assert moved == [True, *[False] * (len(moved) - 1)]


def test_clpu_merges_tasks_that_become_permanent():
    strategy = learn(rival(CLPUDERpp, memory_per_task=80), with_unlearning(STREAM, {}, permanent=[0]).train_stream)
    before = [accuracy(strategy, TEST[task]) for task in range(4)]
    side = {id(p) for p in strategy.model.network(2).parameters()}
    strategy.mark_permanent([2])
    assert strategy.model.main_tasks == (0, 2)
    after = [accuracy(strategy, TEST[task]) for task in range(4)]
    assert after[1] == before[1]
    assert after[3] == before[3]
    assert after[0] > before[0] - 0.1
    assert after[2] > before[2] - 0.2
    assert not side & {id(p) for group in strategy.optimizer.param_groups for p in group["params"]}
    assert strategy.unlearn([3]).claim == "approximate"  # without task 3 the main network might have merged otherwise
    assert 3 not in find_plugin(strategy, CLPUPlugin).memory.samples


def test_clpu_merges_at_the_deadline_and_leaves_the_first_task_unchanged():
    strategy = rival(CLPUDERpp, train_epochs=1)
    stream = with_unlearning(STREAM, {}, deadline=2).train_stream
    strategy.train(stream[0])
    expected = logits(strategy, TEST[0])
    strategy.train(stream[1])
    assert strategy.model.main_tasks == ()
    strategy.train(stream[2])
    assert strategy.model.main_tasks == (0,)
    assert torch.equal(logits(strategy, TEST[0]), expected)
    assert not strategy.model.isolates


def test_pall_resets_weights_of_the_task_and_fine_tunes_shared_ones():
    initial = values(rival(PALL).model)
    results = {}
    for steps in (0, 100):
        strategy = learn(rival(PALL, repair_steps=steps), STREAM.train_stream)
        model = strategy.model
        trained = {name: where.clone() for name, where in trajectory(strategy).moved(1).items()}
        untouched = values(strategy.model)
        kept = logits(strategy, TEST[0])
        record = strategy.unlearn([1])
        assert record.claim == "approximate"
        assert record.affected == (2, 3)
        assert torch.equal(logits(strategy, TEST[0]), kept)
        others = {name: torch.zeros_like(where) for name, where in trained.items()}
        for mask in model.masks.values():
            for name, use in model.graph.parameter_use(mask).items():
                others[f"backbone.{name}"] |= use > 0
        shared = 0
        for name, where in trained.items():
            now = values(strategy.model)[name]
            alone = where & ~others[name]
            assert bool(alone.any())
            assert torch.equal(now[alone], initial[name][alone])
            assert torch.equal(now[~where], untouched[name][~where])
            read = where & others[name]
            shared += int(read.sum())
            assert bool((now[read] == initial[name][read]).all()) == (steps == 0)
        assert shared > 100
        results[steps] = min(accuracy(strategy, TEST[2]), accuracy(strategy, TEST[3]))
    assert results[100] > results[0] + 0.02, results


def test_pall_undoes_a_repair_if_a_task_of_its_samples_is_unlearned():
    initial = values(rival(PALL).model)
    strategy = learn(rival(PALL), STREAM.train_stream)
    strategy.unlearn([1])
    (repair,) = trajectory(strategy).repairs
    touched = trajectory(strategy).moved(repair)
    assert trajectory(strategy).repairs[repair] == {2, 3}
    strategy.unlearn([3])
    assert {2} == set().union(*trajectory(strategy).repairs.values())
    now = values(strategy.model)
    use = strategy.model.graph.parameter_use(strategy.model.masks[2])
    for name, where in touched.items():  # weights that task 2 does not use are not repaired
        free = where & ~(use[name.removeprefix("backbone.")] > 0)
        assert torch.equal(now[name][free], initial[name][free])
    strategy.unlearn([0, 2])
    assert all(torch.equal(value, initial[name]) for name, value in values(strategy.model).items())
    assert not find_plugin(strategy, PALLPlugin).memory.samples
    assert not trajectory(strategy).logs


def test_pall_unlearns_the_last_task_exactly():
    strategy = learn(rival(PALL), STREAM.train_stream[:3])
    assert strategy.unlearn([2]).claim == "exact"
    reference = References(lambda **options: rival(PALL, **options), STREAM).reference([0, 1])
    assert bits(strategy.model) == bits(reference)


@pytest.mark.parametrize("kind", RIVALS)
def test_a_failed_unlearning_of_a_baseline_changes_nothing(kind):
    fails = FailsAtEvent("after_unlearning", RuntimeError)
    strategy = learn(rival(kind, train_epochs=1, plugins=[fails]), STREAM.train_stream[:3])
    before = bits(strategy.model), trajectory(strategy).logs, unlearning_plugin(strategy).ledger.remaining
    plugin = find_plugin(strategy, PALLPlugin if kind is PALL else CLPUPlugin)
    samples = None if plugin is None else plugin.memory.samples
    with pytest.raises(RuntimeError, match="injected"):
        strategy.unlearn([1])
    assert (bits(strategy.model), trajectory(strategy).logs, unlearning_plugin(strategy).ledger.remaining) == before
    assert plugin is None or plugin.memory.samples is samples
    fails.event = ""
    strategy.unlearn([1])
    assert len(trajectory(strategy).repairs) == (kind is PALL)


def test_hat_cl_returns_exclusive_entries_and_changes_no_other_task():
    strategy = learn(amnesiac(unlearning=UnlearningPlugin(deletion="exclusive"), train_epochs=8), STREAM.train_stream)
    initial = values(amnesiac().model)
    kept = {task: logits(strategy, TEST[task]) for task in (0, 2, 3)}
    record = strategy.unlearn([1])
    assert record.affected == ()
    assert record.plan.shared
    assert all(torch.equal(logits(strategy, TEST[task]), before) for task, before in kept.items())
    backbone = {name.removeprefix("backbone."): value for name, value in initial.items() if "backbone" in name}
    assert not stray(strategy.model, backbone)
    strategy.unlearn([0, 2, 3])
    assert all(torch.equal(value, initial[name]) for name, value in values(strategy.model).items())


def test_the_control_drops_heads_and_keeps_every_shared_weight():
    strategy = learn(stock(Replay, unlearning=UnlearningPlugin(obey="head"), epochs=1, mem_size=40), STREAM, 2)
    before = values(strategy.model)
    record = unlearning_plugin(strategy).unlearn(strategy, [0])
    assert record.plan.entries == {}
    assert record.claim == "approximate"
    now = values(strategy.model)
    assert {name for name in before if name not in now} == {"heads.0.weight", "heads.0.bias"}
    assert all(torch.equal(value, before[name]) for name, value in now.items())
    strategy.train(STREAM.train_stream[2])
    assert unlearning_plugin(strategy).unlearn(strategy, [1]).plan.entries == {}


def test_samples_of_dark_replay_are_purged():
    replays = DarkReplayPlugin(memory_per_task=40)
    strategy = learn(stock(epochs=1, plugins=[replays]), STREAM.train_stream)
    kept = replays.memory.samples[2]
    assert any("80 samples" in line for line in unlearning_plugin(strategy).unlearn(strategy, [0, 1]).purged)
    assert set(replays.memory.samples) == {2, 3}
    assert replays.memory.samples[2].x is kept.x
    assert kept.has_logits.all()
    assert not replays.memory.samples[2].has_logits.any()  # they depend on tasks 0 and 1


def test_wrong_arguments_of_baselines_are_refused():
    for options in ({"memory_per_task": 0}, {"logit_weight": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DarkReplayPlugin(**options)
    with pytest.raises(ValueError, match="obey must be one of True, False, 'head'"):
        UnlearningPlugin(obey="heads")
    model = MLP(64, hidden=(8,), features=8)
    for kind in RIVALS:
        with pytest.raises(TypeError, match=WRAPS[kind].__name__):
            kind(model=model, optimizer=Adam(model.parameters()))


FEW = PermutedDigits(3, n_train=120, n_test=20).train_stream


def filled(seed=0, tasks=(0, 1, 2)):
    torch.manual_seed(0)
    model, memory = MultiHeadModel(MLP(64, hidden=(16,), features=8)), TaskMemory(20, seed)
    for task in tasks:
        model.add_head(task, 10)
        memory.store(model, FEW[task], task)
    return model, memory


def test_the_samples_of_a_task_do_not_depend_on_other_tasks():
    (_, every), (_, alone), (_, other_seed) = filled(), filled(tasks=(1,)), filled(seed=1)
    assert torch.equal(every.samples[1].x, alone.samples[1].x)
    assert not torch.equal(every.samples[1].x, other_seed.samples[1].x)


def test_the_loss_is_the_mean_over_samples_of_several_tasks():
    model, memory = filled()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    batch = memory.draw((0, 2), 25, torch.Generator().manual_seed(0))
    assert batch.keys() == {0, 2}
    assert sum(map(len, batch.values())) == 25
    assert len(torch.cat([samples.x.flatten(1) for samples in batch.values()]).unique(dim=0)) == 25
    each = [
        0.3 * F.mse_loss(model(x[None], task)[0], logits) + 0.7 * F.cross_entropy(model(x[None], task)[0], y)
        for task, samples in batch.items()
        for x, y, logits in zip(samples.x, samples.y, samples.logits, strict=True)
    ]
    torch.testing.assert_close(DarkLoss(0.3, 0.7)(model, batch), torch.stack(each).mean())
    assert {task: len(samples) for task, samples in memory.draw((1, 2), 1000).items()} == {1: 20, 2: 20}


def test_without_logits_the_label_of_a_sample_gets_their_weight():
    model, memory = filled(tasks=(0,))
    held = memory.samples[0]
    logits = held.logits + 1.0
    logits[::3] = torch.nan
    held = replace(held, logits=logits)
    assert held.has_logits.tolist() == [n % 3 != 0 for n in range(20)]
    labels = F.cross_entropy(model(held.x, 0), held.y, reduction="none")
    dark = torch.where(held.has_logits, torch.tensor(1.0), labels)  # every logit is off by one
    loss = DarkLoss(0.3, 0.7)(model, {0: held})
    torch.testing.assert_close(loss, (0.3 * dark + 0.7 * labels).mean())
    loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
