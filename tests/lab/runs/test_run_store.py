"""A store computes every state once, with the bits of a run without a store; workers fill it in advance."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training import AGEM
from avalanche.training.plugins import EvaluationPlugin
from support.forked import Forked, forked
from support.forked_interpreters import forked_interpreters
from support.strategies import DIGITS, amnesiac, brief, learn, make, stock
from support.strategy_state import bits

from avalanche_amnesia import WandBLogger, capacity_metrics
from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.benchmarks.requests import tasks_after_each
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.evaluation import References, accuracy_difference_metrics, jsd_metrics
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.lab.runs import ReferenceWorkers, RunStore
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import read_body
from avalanche_amnesia.training import HAT


def run(folder: Path, out: Path) -> None:
    """Train three tasks, unlearn one, train another; write ``begun`` and ``result.json`` into ``out``."""
    torch.set_num_threads(1)
    logger = WandBLogger(dir=folder.with_name("wandb"), mode="offline")
    evaluator = EvaluationPlugin(accuracy_metrics(epoch=True), capacity_metrics(), loggers=[logger])
    through = RunStore(folder).run(amnesiac(train_epochs=2, evaluator=evaluator))
    (out / "begun").touch()
    learn(through, DIGITS.train_stream[:3])
    record = through.unlearn([1])
    through.train(DIGITS.train_stream[3])
    through.strategy.eval(DIGITS.test_stream)
    logger.finish()
    model = bits(through.strategy.model)
    result = {"computed": through.computed, "model": model, "after": record.after}
    (out / "result.json").write_text(json.dumps(result))


def through(run, tasks, unlearned=()):
    learn(run, [DIGITS.train_stream[task] for task in tasks])
    for task in unlearned:
        run.unlearn([task])
    return run


def test_stored_states_are_not_computed_again_and_their_strategy_continues(tmp_path):
    plain = learn(brief(), DIGITS.train_stream[:3])
    record = plain.unlearn([1])
    first = through(RunStore(tmp_path).run(brief()), (0, 1, 2), [1])
    second = through(RunStore(tmp_path).run(brief()), (0, 1, 2))
    assert second.unlearn([1]).after == record.after
    assert (first.computed, second.computed) == (4, 0)
    assert first.key == second.key
    assert bits(first.strategy.model) == bits(second.strategy.model) == bits(plain.model)
    assert through(RunStore(tmp_path).run(brief()), (0, 1, 3)).computed == 1
    for strategy in (second.strategy, plain):
        strategy.train(DIGITS.train_stream[3])
        strategy.unlearn([0])
    assert bits(second.strategy.model) == bits(plain.model)


def test_references_of_another_run_are_not_trained_again(tmp_path):
    first = References(brief, DIGITS, store=RunStore(tmp_path))
    second = References(brief, DIGITS, store=RunStore(tmp_path))
    alone = References(brief, DIGITS)
    for path in ([0, 1], [1], [1, 2], [0, 2]):
        models = [references.reference(path) for references in (first, second, alone)]
        hashes = [bits(model) for model in models]
        assert hashes[0] == hashes[1] == hashes[2]
    assert (first.trainings, second.trainings, alone.trainings) == (5, 0, 5)
    assert second.seconds([1, 2]) > 0
    variants = [first.reference([0], variant) for variant in ("same", "order", "seed")]
    assert len({json.dumps(bits(model)) for model in variants}) == 3
    assert first.trainings == 7


def test_a_bounded_store_deletes_old_states_and_computes_them_again(tmp_path):
    unbounded = through(RunStore().run(brief()), (0, 1, 2, 3))
    store = RunStore(tmp_path, keep=100_000)
    run = through(store.run(brief()), (0, 1, 2, 3))
    assert store.nbytes() <= 100_000
    assert len(store.nodes()) < 4
    again = through(store.run(brief()), (0, 1, 2, 3))
    assert bits(run.strategy.model) == bits(again.strategy.model) == bits(unbounded.strategy.model)
    beginning = through(store.run(brief()), (0,))
    assert bits(beginning.strategy.model) == bits(through(RunStore().run(brief()), (0,)).strategy.model)


def pruned_often(path, done):
    store = RunStore(path)
    while not done.exists():
        store.prune(random.choice((0, 60_000)))
        time.sleep(0.01)


def test_runs_are_right_while_another_process_prunes_the_store(tmp_path):
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


def test_prune_needs_a_bound_and_keeps_spared_states(tmp_path):
    store = RunStore(tmp_path)
    through(store.run(brief()), (0, 1, 2))
    through(store.run(brief()), (1, 3))
    with pytest.raises(ValueError, match="say what may go"):
        store.prune()
    with pytest.raises(ValueError, match="tasks: \\['2'\\] are no labels of tasks"):
        store.prune(tasks=["2"])
    assert len(store.nodes()) == 5
    assert store.prune(tasks=[2]) > 0
    assert {node.trained for node in store.nodes()} == {(0,), (0, 1), (1,), (1, 3)}
    store.prune(60_000)
    assert store.nodes()
    assert store.nbytes() <= 60_000
    newest, oldest = store.nodes()[0].key, store.nodes()[-1].key
    _, files = read_body(tmp_path / "nodes" / oldest)
    (tmp_path / "blobs" / next(iter(files.values()))).unlink()  # a state that lost a file hinders nothing
    store.prune(0, spare=[newest])
    assert [node.key for node in store.nodes()] == [newest]
    assert bits(through(store.run(brief()), (1, 3)).strategy.model)
    store.prune(keep=0)
    assert not list((tmp_path / "blobs").iterdir())


@pytest.mark.parametrize("damage", ["state", "another state", "a byte of the tensors"])
def test_a_damaged_state_is_computed_again(damage, tmp_path):
    whole = through(RunStore(tmp_path).run(brief()), (0, 1))
    if damage == "state":
        file = tmp_path / "nodes" / whole.key / "state.json"
        file.write_text(file.read_text()[:-10])
    elif damage == "another state":  # a store badly copied
        earlier, later = sorted(RunStore(tmp_path).nodes(), key=lambda node: len(node.trained))
        shutil.copy(tmp_path / "nodes" / earlier.key / "state.json", tmp_path / "nodes" / later.key / "state.json")
    else:
        for file in (tmp_path / "blobs").iterdir():
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = through(RunStore(tmp_path).run(brief()), (0, 1))
    with pytest.warns(UserWarning, match="computed again"):
        assert bits(again.strategy.model) == bits(whole.strategy.model)
    assert again.computed > 0
    third = through(RunStore(tmp_path).run(brief()), (0, 1))
    assert bits(third.strategy.model) == bits(whole.strategy.model)
    assert third.computed == 0


def test_a_failed_step_leaves_the_run_unchanged(tmp_path):
    run = through(RunStore(tmp_path).run(brief()), (0, 1))
    key, before = run.key, bits(run.strategy.model)
    with pytest.raises(RequestError):
        run.unlearn([3])
    assert run.key == key
    assert bits(run.strategy.model) == before
    assert through(run, (2,)).trained == (0, 1, 2)
    run = through(RunStore(tmp_path).run(make(HAT, train_epochs=1)), (0,))
    with pytest.raises(RequestError, match="HAT does not unlearn"):
        run.unlearn([0])
    assert run.trained == (0,)


agem = partial(stock, AGEM, patterns_per_exp=10, sample_size=10, epochs=1)


def test_a_strategy_that_cannot_be_saved_runs_without_the_store(tmp_path):
    with pytest.warns(UserWarning, match="not stored: AGEMPlugin"):
        run = RunStore(tmp_path).run(agem())
    learn(run, DIGITS.train_stream[:2])
    assert run.computed == 2
    with pytest.raises(StateError, match="can't go back"):
        run.restart()
    assert not RunStore(tmp_path).nodes()
    references = References(agem, DIGITS)
    with pytest.warns(UserWarning, match="not stored"):
        first = references.reference([0, 1])
    longer = references.reference([0, 1, 2])
    assert references.trainings == 3
    assert bits(first) != bits(longer)


def started(folder: Path) -> tuple[Forked, Path]:
    """Start a run with a store in another process; return it and its output folder."""
    out = Path(tempfile.mkdtemp(dir=folder.parent))
    return forked(run, folder, out), out


def answer(process: Forked, out: Path) -> dict:
    """Return the results of a process after its end."""
    process.join(timeout=300)
    assert process.exitcode == 0
    return json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_two_processes_compute_no_state_twice_and_a_killed_run_is_continued(tmp_path):
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


BENCHMARK = with_unlearning(DIGITS, {1: [0], 3: [1]})
RUN = int(os.environ.setdefault("PROCESS_OF_THIS_TEST", str(os.getpid())))


def make_here_alone(**options):
    if os.getpid() != RUN:
        raise RuntimeError("no data on this machine")
    return brief(**options)


def with_a_worker(maker):
    return References(maker, BENCHMARK, store=RunStore(), workers=ReferenceWorkers(1))


def begun(references):
    """Return references whose workers have finished."""
    jsd_metrics(references, noise_floor=["order"])
    accuracy_difference_metrics(references)
    with forked_interpreters():
        references.check(BENCHMARK.train_stream[0])
        for training in references.workers._trainings:
            training.exception(timeout=200)
    return references


@pytest.mark.slow
def test_workers_train_the_references_of_the_metrics_with_the_same_bits():
    alone, references = References(brief, BENCHMARK), begun(with_a_worker(brief))
    assert references.workers.failure() is None
    paths = [remaining for trained, remaining in tasks_after_each(BENCHMARK.train_stream) if trained != remaining]
    for path, variant in [(path, variant) for path in paths for variant in ("same", "order")]:
        models = [each.reference(path, variant) for each in (alone, references)]
        assert state_hashes(models[0].state_dict()) == state_hashes(models[1].state_dict())
    assert references.trainings == 0
    assert len(references.store.nodes()) == 15
    assert references.reference([4], "seed") is not None  # a reference that no metric needs
    assert references.trainings == 1


@pytest.mark.slow
def test_after_a_failed_worker_the_run_trains_references_itself():
    references = begun(with_a_worker(make_here_alone))
    with pytest.warns(UserWarning, match="no data on this machine"):
        references.check(BENCHMARK.train_stream[1])
    assert references.reference([1]) is not None
    assert references.trainings == 1


def test_workers_need_a_store_that_they_share_with_the_run():
    with pytest.raises(ReferencesError, match=r"store=RunStore\(\)"):
        References(brief, BENCHMARK, workers=ReferenceWorkers(1))
    with pytest.raises(ValueError, match="n must be an int of at least 1"):
        ReferenceWorkers(0)


def test_strategies_that_cannot_be_saved_have_no_workers():
    references = with_a_worker(agem)
    jsd_metrics(references)
    with pytest.warns(UserWarning, match="not stored"):
        references.check(BENCHMARK.train_stream[0])
    assert references.workers is None


def test_a_pickled_store_has_the_same_directory_and_does_not_delete_it(tmp_path):
    store = RunStore()
    run = learn(store.run(brief()), DIGITS.train_stream[:1])
    copy = pickle.loads(pickle.dumps(store))
    assert [node.key for node in copy.nodes()] == [run.key]
    del copy
    assert store.has(run.key)


SCRIPT = """
import time, torch
from avalanche_amnesia import *
from avalanche_amnesia.lab.runs import ReferenceWorkers, RunStore

benchmark = with_unlearning(SplitDigits(n_train=200, n_test=100), {1: [0], 3: [1]})
scale = 2.0

class Net(torch.nn.Module):
    features = 8

    def __init__(self):
        super().__init__()
        self.inner = MLP(64, hidden=(8,), features=8)

    def forward(self, x):
        return torch.relu(self.inner(x) * scale)

def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels) * scale

def make_strategy(**options):
    torch.manual_seed(0)
    model = MaskedModel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return AmnesiacHAT(model=model, optimizer=optimizer, criterion=loss, train_epochs=8, **options)

store = RunStore("store")
kept = References(make_strategy, benchmark, store=store, workers=ReferenceWorkers(1))
gone = References(make_strategy, benchmark, store=RunStore(), workers=ReferenceWorkers(1))
for references in (kept, gone):
    jsd_metrics(references, noise_floor=["order"])
    references.check(benchmark.train_stream[0])
del references, gone
while not store.nodes():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_and_with_own_classes_has_workers_and_does_not_wait_for_them(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert 1 <= len(RunStore(tmp_path / "store").nodes()) < 10
