"""Every state is computed once, whichever run asks for it, and is what it would have been without the store."""

import argparse
import functools
import json
import random
import tempfile
import time
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from avalanche.training import AGEM
from support import stored_run
from support.forked import Forked, forked
from support.strategies import DIGITS, PRICED, brief, learn, make, mlp, stock
from support.strategy_state import bits
from torch import nn
from torch.optim import Adam

from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark, with_unlearning
from avalanche_amnesia.evaluation import References
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models import MLP
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training import HAT, SeedingPlugin

AFTER = (2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19, 20)
PUBLISHED = dict(zip(AFTER, (1, 2, 5, 6, 7, 10, 11, 12, 15, 16, 17, 20), strict=True))
"""Task after which (from 1) → task to unlearn, of the published schedule of 20 tasks."""


def through(run, tasks, unlearned=()):
    learn(run, [DIGITS.train_stream[task] for task in tasks])
    for task in unlearned:
        run.unlearn([task])
    return run


def test_what_is_there_is_not_computed_again(tmp_path):
    plain = learn(brief(), DIGITS.train_stream[:3])
    record = plain.unlearn([1])
    first = through(RunStore(tmp_path).run(brief()), (0, 1, 2), [1])
    second = through(RunStore(tmp_path).run(brief()), (0, 1, 2))
    assert second.unlearn([1]).after == record.after
    assert (first.computed, second.computed) == (4, 0)
    assert first.key == second.key
    assert bits(first.strategy.model) == bits(second.strategy.model) == bits(plain.model)
    assert through(RunStore(tmp_path).run(brief()), (0, 1, 3)).computed == 1


def test_a_plain_strategy_goes_on_from_a_state_that_was_there(tmp_path):
    through(RunStore(tmp_path).run(brief()), (0, 1))
    run = through(RunStore(tmp_path).run(brief()), (0, 1))
    plain = learn(brief(), DIGITS.train_stream[:2])
    for strategy in (run.strategy, plain):
        strategy.train(DIGITS.train_stream[2])
        strategy.unlearn([0])
    assert run.computed == 0
    assert bits(run.strategy.model) == bits(plain.model)


# Keys --------------------------------------------------------------------------------------------------------------


class Wider(nn.Module):
    features = 16

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), scale

    def forward(self, x):
        return self.inner(x) * self.scale


class Louder(Wider):
    def forward(self, x):
        return self.inner(x) * self.scale * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"train_epochs": 2}),
        ({}, {"train_mb_size": 7}),
        ({}, {"seed": 1}),
        ({}, {"torch_seed": 1}),
        ({}, {"optimizer": partial(Adam, lr=2e-2)}),
        ({}, {"optimizer": partial(Adam, lr=1e-2, betas=(0.8, 0.999))}),
        ({}, {"masks": replace(PRICED, sparsity_weight=0.1)}),
        ({}, {"compensation": "none"}),
        ({}, {"reset_optimizer": False}),
        ({}, {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}),
        ({}, {"criterion": lambda x, y: nn.functional.cross_entropy(x, y)}),
        (
            {"criterion": lambda x, y: nn.functional.cross_entropy(x, y)},
            {"criterion": lambda x, y: 2 * nn.functional.cross_entropy(x, y)},
        ),
        ({}, {"plugins": [SeedingPlugin(3)]}),
        ({"net": lambda: Wider(1.0)}, {"net": lambda: Wider(2.0)}),
        ({"net": lambda: Wider(1.0)}, {"net": lambda: Louder(1.0)}),
    ],
)
def test_any_changed_setting_changes_the_key(one, other, tmp_path):
    store = RunStore(tmp_path)
    assert store.run(brief(**one)).key == store.run(brief(**one)).key
    assert store.run(brief(**one)).key != store.run(brief(**other)).key


def weighted(scale):
    return lambda x, y: scale * nn.functional.cross_entropy(x, y)


def defaulting(scale):
    def loss(x, y, scale=scale):
        return scale * nn.functional.cross_entropy(x, y)

    return loss


def module_with(**content):
    """A script's module, as it would be imported, with a loss that uses another function, a constant and a table."""
    module = types.ModuleType("a_script")
    module.__dict__.update({"cross_entropy": nn.functional.cross_entropy, **content})
    source = "def loss(x, y):\n    return SCALE * part(cross_entropy(x, y)) * TABLE['a'] * settings.rate\n"
    exec(source, module.__dict__)
    return module.loss


class Gain(SeedingPlugin):
    rate = 1.0


class MoreGain(SeedingPlugin):
    rate = 2.0


MoreGain.__qualname__ = MoreGain.__name__ = "Gain"
CONTENT = {"SCALE": 1.0, "part": lambda v: v, "TABLE": {"a": 1}, "settings": argparse.Namespace(rate=1)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (weighted(1.0), weighted(2.0)),
        (weighted(torch.ones(())), weighted(torch.zeros(()))),
        (weighted(np.ones(1)), weighted(np.zeros(1))),
        (defaulting(1.0), defaulting(2.0)),
        (functools.partial(weighted, 1.0)(), functools.partial(weighted, 3.0)()),
        *(
            (module_with(**CONTENT), module_with(**CONTENT | changed))
            for changed in (
                {"SCALE": 2.0},
                {"part": lambda v: v * 2},
                {"TABLE": {"a": 2}},
                {"settings": argparse.Namespace(rate=2)},
            )
        ),
    ],
    ids=["closure", "tensor", "array", "default", "partial", "constant", "function", "table", "settings"],
)
def test_so_does_whatever_a_function_of_the_script_uses(one, other, tmp_path):
    store = RunStore(tmp_path)
    keys = [store.run(brief(criterion=criterion)).key for criterion in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]


def test_so_does_an_attribute_of_a_plugin_s_class(tmp_path):
    store = RunStore(tmp_path)
    keys = [store.run(brief(plugins=[kind(3)])).key for kind in (Gain, Gain, MoreGain)]
    assert keys[0] == keys[1] != keys[2]


def test_what_only_evaluates_does_not(tmp_path):
    store = RunStore(tmp_path)
    assert store.run(brief(eval_mb_size=3)).key == store.run(brief(eval_mb_size=5)).key


@pytest.mark.parametrize(
    "other",
    [
        SplitDigits(n_train=380, n_test=200),
        SplitDigits(n_train=400, n_test=200, seed=1),
        with_unlearning(DIGITS, permanent=[0]),
        with_unlearning(DIGITS, deadline=2),
        with_unlearning(DIGITS, {0: [0]}),
    ],
    ids=["fewer samples", "other classes", "permanent", "deadline", "a request"],
)
def test_so_does_any_change_of_the_data_and_of_the_requests(other, tmp_path):
    run = RunStore(tmp_path).run(brief())
    keys = set()
    for benchmark in (DIGITS, with_unlearning(DIGITS), other):
        run.restart()
        run.train(benchmark.train_stream[0])
        keys.add(run.key)
    assert len(keys) == 2


# References --------------------------------------------------------------------------------------------------------


def remaining_after(schedule):
    """Remaining tasks, from 0, at each request of a schedule that counts from 1."""
    gone: list[int] = []
    for after, task in schedule.items():
        gone.append(task - 1)
        yield [task for task in range(after) if task not in gone]


def test_the_published_schedule_s_references_cost_twelve_trainings():
    x, y = torch.rand(400, 8), torch.arange(400) % 40
    stream = task_benchmark((x, y), (x, y), [[2 * t, 2 * t + 1] for t in range(20)])

    net = partial(MLP, 8, hidden=(6,), features=4)
    small = partial(make, net=net, train_mb_size=20, train_epochs=1, compensation="none")
    references = References(small, stream)
    for remaining in remaining_after(PUBLISHED):
        references.reference(remaining)
    assert references.trainings == 12


def test_references_of_another_process_are_there(tmp_path):
    first = References(brief, DIGITS, store=RunStore(tmp_path))
    second = References(brief, DIGITS, store=RunStore(tmp_path))
    alone = References(brief, DIGITS)
    for path in ([0, 1], [1], [1, 2], [0, 2]):
        models = [references.reference(path) for references in (first, second, alone)]
        hashes = [bits(model) for model in models]
        assert hashes[0] == hashes[1] == hashes[2]
    assert (first.trainings, second.trainings, alone.trainings) == (5, 0, 5)
    assert second.seconds([1, 2]) > 0


def test_another_order_and_another_seed_are_other_runs(tmp_path):
    references = References(brief, DIGITS, store=RunStore(tmp_path))
    models = [references.reference([0], variant) for variant in ("same", "order", "seed")]
    assert len({json.dumps(bits(model)) for model in models}) == 3
    assert references.trainings == 3


# Bounds and damage -------------------------------------------------------------------------------------------------


def test_a_bounded_store_forgets_what_was_not_used_for_longest_and_computes_it_again(tmp_path):
    unbounded = through(RunStore().run(brief()), (0, 1, 2, 3))
    store = RunStore(tmp_path, keep=100_000)
    run = through(store.run(brief()), (0, 1, 2, 3))
    assert store.nbytes() <= 100_000
    assert len(store.nodes()) < 4
    again = through(store.run(brief()), (0, 1, 2, 3))
    assert bits(run.strategy.model) == bits(again.strategy.model) == bits(unbounded.strategy.model)
    beginning = through(store.run(brief()), (0,))
    assert bits(beginning.strategy.model) == bits(through(RunStore().run(brief()), (0,)).strategy.model)


def test_a_task_that_is_pruned_leaves_no_state_that_knows_it(tmp_path):
    store = RunStore(tmp_path)
    through(store.run(brief()), (0, 1, 2), [1])
    through(store.run(brief()), (0, 2))
    freed = store.prune(tasks=[1])
    assert freed > 0
    assert {node.trained for node in store.nodes()} == {(0,), (0, 2)}
    blobs = {file.name for file in (tmp_path / "blobs").iterdir()}
    through(store.run(brief()), (0, 2))
    assert {file.name for file in (tmp_path / "blobs").iterdir()} == blobs
    assert store.prune(keep=0) > 0
    assert not list((tmp_path / "blobs").iterdir())


def test_seconds_of_a_state_that_another_process_has_deleted(tmp_path):
    through(RunStore(tmp_path).run(brief()), (0, 1))
    run = through(RunStore(tmp_path).run(brief()), (0, 1))
    RunStore(tmp_path).prune(0)
    assert run.seconds() > 0
    assert run.computed == 2
    taken = through(RunStore(tmp_path).run(brief()), (0, 1))
    assert taken.strategy.model.tasks == (0, 1)
    RunStore(tmp_path).prune(0)
    assert taken.seconds() > 0
    assert taken.computed == 0


def pruned_often(path, done):
    store = RunStore(path)
    while not done.exists():
        store.prune(random.choice((0, 60_000)))
        time.sleep(0.01)


def test_beside_a_process_that_prunes_all_states_are_what_they_would_be(tmp_path):
    paths = ((0, 1), (0, 2), (1, 0))
    models = [bits(through(RunStore().run(brief()), path).strategy.model) for path in paths]
    beside = forked(pruned_often, tmp_path / "store", tmp_path / "done")
    store = RunStore(tmp_path / "store")
    for path, model in zip(paths, models, strict=True):
        run = through(store.run(brief()), path)
        assert bits(run.strategy.model) == model
        assert run.seconds() > 0
        assert store.nbytes() >= 0
    assert beside.is_alive()
    (tmp_path / "done").touch()
    beside.join()
    assert beside.exitcode == 0


def test_what_may_go_has_to_be_said_and_both_bounds_hold(tmp_path):
    store = RunStore(tmp_path)
    through(store.run(brief()), (0, 1, 2))
    through(store.run(brief()), (1, 3))
    with pytest.raises(ValueError, match="say what may go"):
        store.prune()
    assert len(store.nodes()) == 5
    store.prune(60_000, tasks=[2])
    assert store.nodes()
    assert not [node for node in store.nodes() if 2 in node.trained]
    assert store.nbytes() <= 60_000
    newest = store.nodes()[0].key
    store.prune(0, spare=[newest])
    assert [node.key for node in store.nodes()] == [newest]
    assert bits(through(store.run(brief()), (1, 3)).strategy.model)


@pytest.mark.parametrize("damage", ["state", "tensors", "a byte of the tensors"])
def test_a_damaged_state_is_computed_again(damage, tmp_path):
    whole = through(RunStore(tmp_path).run(brief()), (0, 1))
    if damage == "state":
        file = tmp_path / "nodes" / whole.key / "state.json"
        file.write_text(file.read_text()[:-10])
    else:
        for file in (tmp_path / "blobs").iterdir():
            content = file.read_bytes()
            file.write_bytes(content[:-1] if damage == "tensors" else content[:-1] + bytes([content[-1] ^ 1]))
    again = through(RunStore(tmp_path).run(brief()), (0, 1))
    with pytest.warns(UserWarning, match="computed again"):
        assert bits(again.strategy.model) == bits(whole.strategy.model)
    assert again.computed > 0
    third = through(RunStore(tmp_path).run(brief()), (0, 1))
    assert bits(third.strategy.model) == bits(whole.strategy.model)
    assert third.computed == 0


def test_a_step_that_fails_leaves_the_run_where_it_was(tmp_path):
    run = through(RunStore(tmp_path).run(brief()), (0, 1))
    key, before = run.key, bits(run.strategy.model)
    with pytest.raises(RequestError):
        run.unlearn([3])
    assert run.key == key
    assert bits(run.strategy.model) == before
    assert through(run, (2,)).trained == (0, 1, 2)


def test_a_strategy_that_does_not_unlearn_says_so_before_anything(tmp_path):
    run = through(RunStore(tmp_path).run(make(HAT, train_epochs=1)), (0,))
    with pytest.raises(RequestError, match="HAT does not unlearn"):
        run.unlearn([0])
    assert run.trained == (0,)


def test_what_can_t_be_saved_still_runs_and_says_so(tmp_path):
    strategy = stock(AGEM, patterns_per_exp=10, sample_size=10, epochs=1)
    with pytest.warns(UserWarning, match="not stored: AGEMPlugin"):
        run = RunStore(tmp_path).run(strategy)
    learn(run, DIGITS.train_stream[:2])
    assert run.computed == 2
    with pytest.raises(StateError, match="can't go back"):
        run.restart()
    assert not RunStore(tmp_path).nodes()

    agem = partial(stock, AGEM, patterns_per_exp=10, sample_size=10, epochs=1)
    references = References(agem, DIGITS)
    with pytest.warns(UserWarning, match="not stored"):
        first = references.reference([0, 1])
    longer = references.reference([0, 1, 2])
    assert references.trainings == 3
    assert bits(first) != bits(longer)


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StateError, match=r"thesis\.tex"):
        RunStore(tmp_path)


# Processes ---------------------------------------------------------------------------------------------------------


def started(folder: Path) -> tuple[Forked, Path]:
    """A run through a store in a process of its own, and where it writes."""
    out = Path(tempfile.mkdtemp(dir=folder.parent))
    return forked(stored_run.run, folder, out), out


def answer(process: Forked, out: Path) -> dict:
    """Results that a process wrote at its end."""
    process.join(timeout=300)
    assert process.exitcode == 0
    return json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_two_processes_compute_no_state_twice_and_a_killed_one_is_taken_up(tmp_path):
    one, other = (answer(*process) for process in [started(tmp_path / "both") for _ in range(2)])
    assert (one["model"], one["after"]) == (other["model"], other["after"])
    assert one["computed"] + other["computed"] == 5
    chance = random.Random(0)
    for _ in range(3):
        process, out = started(tmp_path / "killed")
        while not (out / "begun").exists():
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.4))
        process.kill()
        process.join()
    last = answer(*started(tmp_path / "killed"))
    assert (last["model"], last["after"]) == (one["model"], one["after"])
