"""Workers train references in advance: with the same bits, none twice, and without waiting for a failed worker."""

import os
import pickle
import subprocess
import sys
from functools import partial

import pytest
from avalanche.training import AGEM
from support.forked_interpreters import forked_interpreters
from support.strategies import DIGITS, brief, learn, stock

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.benchmarks.requests import tasks_after_each
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.evaluation import References, accuracy_difference_metrics, jsd_metrics
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.lab.runs import ReferenceWorkers, RunStore

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
    agem = partial(stock, AGEM, patterns_per_exp=10, sample_size=10, epochs=1)
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


def test_loaded_references_start_no_workers():
    references = with_a_worker(brief)
    jsd_metrics(references)
    loaded = pickle.loads(pickle.dumps(references))
    loaded.check(BENCHMARK.train_stream[0])
    assert loaded.workers is None


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
