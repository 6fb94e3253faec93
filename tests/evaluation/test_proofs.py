"""A proof trains the remaining tasks again: it holds where all bits are equal, and else the record is approximate."""

from functools import partial

import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.core import SupervisedPlugin
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import tiny
from support.isolated_pools import pools
from support.strategies import DIGITS, amnesiac, learn, make, quiet, stock
from support.strategy_state import unlearning_plugin

from avalanche_amnesia import References, RequestError, SplitDigits, jsd_metrics, with_unlearning
from avalanche_amnesia.audit import ProofError, UnlearningRecord, verify
from avalanche_amnesia.contrib.baselines import Independent
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.lab.logging import JSONLogger
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.report.verdicts import verdict_of
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.training import load_state
from avalanche_amnesia.unlearning import claims

in_pools = partial(pools, "norms", train_epochs=1)


@pytest.mark.parametrize("maker", [in_pools, partial(make, Independent, train_epochs=1)], ids=["pools", "independent"])
def test_tasks_samples_and_classes_are_proved_unlearned(maker, tmp_path):
    strategy, store = learn(maker(), DIGITS, 4), RunStore(tmp_path)
    strategy.unlearn([1])
    strategy.unlearn(task=2, samples=[0, 7])
    strategy.unlearn(task=3, classes=[1])
    some = strategy.prove(maker, DIGITS, tasks=[2])
    assert (some.proof.tasks, some.proved, some.claim) == ((2,), False, "exact")
    assert some.proof.hashes.items() < strategy.prove(maker, DIGITS, store=store).proof.hashes.items()
    record = unlearning_plugin(strategy).records[-1]
    assert (record.proof.tasks, record.proved, record.proof.hashes) == ((0, 2, 3), True, record.after)
    assert "exact, proved: tasks 0, 2, 3 trained without these data gave" in " ".join(str(record).split())
    again = References(maker, DIGITS, store=store)
    record = unlearning_plugin(strategy).prove(strategy, again)
    assert strategy.prove(maker, DIGITS, tasks=[0], store=store) == record  # covers more
    assert again.of(unlearning_plugin(strategy)).trainings == 0  # an interrupted proof goes on
    strategy.save(tmp_path / "state")
    load_state(loaded := maker(), tmp_path / "state")
    assert unlearning_plugin(loaded).records[-1] == record


def test_tasks_that_share_weights_are_proved_together():
    maker = partial(amnesiac, train_epochs=1)
    strategy = learn(maker(), DIGITS, 3)
    strategy.unlearn([2])
    with pytest.raises(RequestError, match=r"tasks=\[0\]: tasks of a MaskedModel share weights"):
        strategy.prove(maker, DIGITS, tasks=[0])
    learn(strategy, DIGITS, [3])
    assert strategy.prove(maker, DIGITS).proof.tasks == (0, 1, 3)
    assert References(maker, DIGITS).prove(unlearning_plugin(strategy).records[-1]).proof.tasks == (0, 1)


def test_a_record_without_proof_is_refused_and_stays():
    strategy = stock(Naive, epochs=1)
    plugin = unlearning_plugin(learn(strategy, DIGITS, 2))
    references = References(partial(stock, Naive, epochs=1), DIGITS)
    with pytest.raises(RequestError, match="nothing was unlearned"):
        plugin.prove(strategy, references)
    record = plugin.unlearn(strategy, [1])
    with pytest.raises(RequestError, match=r"approximate \(.*only exact and conditional .* jsd_metrics"):
        plugin.prove(strategy, references)
    assert plugin.records == [record]


def test_arguments_of_another_run_are_refused_and_change_nothing():
    strategy = learn(in_pools(), DIGITS, 2)
    record = strategy.unlearn([0])
    with pytest.raises(RequestError, match=r"tasks=\[0\] do not remain"):
        strategy.prove(in_pools, DIGITS, tasks=[0])
    with pytest.raises(ReferencesError, match="other settings of DisjointSubnets"):
        strategy.prove(partial(in_pools, train_mb_size=20), DIGITS)
    part = strategy.unlearn(task=1, samples=[3])
    with pytest.raises(ReferencesError, match="it has the unlearned samples there"):
        References(in_pools, DIGITS).prove(part)
    assert References(in_pools, DIGITS).without({1: [3]}).prove(part).proved
    assert unlearning_plugin(strategy).records == [record, part]


class Items(tiny.Items):
    """All digits; a sample that was read more than ``n`` times is twice as bright."""

    def __init__(self, n=10**6):
        (digits,) = SplitDigits(1, n_train=400, n_test=200).train_stream
        super().__init__(digits.tensors[0], digits.targets, n=n, reads=[0] * 400)

    def __getitem__(self, at):
        self.reads[at] += 1
        return self.items[at] * (2 if self.reads[at] > self.n else 1), self.targets[at]


def of_user(n):
    return nc_benchmark(Items(n), Items(), 5, True, seed=0, fixed_class_order=list(range(10)))


def test_a_conditional_claim_stays_in_a_process_that_knew_the_data():
    """A vocabulary or a cache of the user's code may still know them."""
    benchmark = of_user(10**6)
    strategy = learn(in_pools(), benchmark, [0, 1, 2])  # a slice would be another stream, with other slots
    strategy.unlearn([1])
    record = strategy.prove(in_pools, benchmark)
    assert (record.claim, record.proved) == ("conditional", False)
    assert (record.proof.apart, record.proof.tasks) == (False, (0, 2))
    assert "; the claim stays, as this process had known these data" in " ".join(str(record).split())


class Remembers(SupervisedPlugin):
    """A plugin whose saved state may hold data of every task."""

    def state(self):
        return {}

    def load_state(self, state):
        pass


@pytest.mark.parametrize(("plugin", "proved"), [(Remembers, False), (SupervisedPlugin, True)])
def test_a_state_that_a_plugin_of_the_user_loads_may_hold_the_data(plugin, proved, tmp_path, monkeypatch):
    make, benchmark = partial(in_pools, plugins=[plugin()]), of_user(10**6)
    learn(make(), benchmark, [0, 1, 2]).save(tmp_path)
    monkeypatch.setattr(claims, "TRAINED_DATA", set())  # as in a new process
    strategy = make()
    load_state(strategy, tmp_path)
    strategy.unlearn([1], allow_unknown=True)
    assert strategy.prove(make, benchmark).proof.apart is proved


def test_data_that_changed_after_their_first_use_make_the_record_approximate(tmp_path):
    benchmark = of_user(1)
    log = JSONLogger(tmp_path / "run")
    strategy = learn(in_pools(evaluator=EvaluationPlugin(loggers=[log])), benchmark, [0, 1, 2])
    assert strategy.unlearn([1]).claim == "conditional"
    reason = r"task 0, trained again without the unlearned data, has other bits, first in heads\.0\.bias"
    with pytest.raises(ProofError, match=f"^{reason}.*make .*Items in the data stateless, and train") as failed:
        strategy.prove(in_pools, benchmark)
    (record,) = strategy.records
    assert record == failed.value.record
    assert (record.claim, record.rests_on, failed.value.tasks) == ("approximate", (), (0,))
    with pytest.raises(RequestError, match="this record is approximate"):
        strategy.prove(in_pools, benchmark)
    log.finish()
    assert "task 0, trained again" in (tmp_path / "run" / "records" / "1.json").read_text()
    strategy.save(tmp_path / "state")
    load_state(loaded := in_pools(), tmp_path / "state")
    assert unlearning_plugin(loaded).records == [record]
    assert "task 0, trained again" in loaded.plan_unlearning([2]).reasons[0]
    assert loaded.plan_unlearning([0]).claim == "conditional"


def test_references_of_metrics_prove_in_passing(tmp_path):
    benchmark = with_unlearning(DIGITS, {1: [0]})
    references = References(in_pools, benchmark)
    with JSONLogger(tmp_path) as log:
        strategy = in_pools(evaluator=EvaluationPlugin(jsd_metrics(references, noise_floor=[]), loggers=[log]))
        for experience in benchmark.train_stream[:3]:
            strategy.train(experience)
            strategy.eval(benchmark.test_stream)
    trainings = references.trainings
    (record,) = unlearning_plugin(strategy).records
    assert (record.proved, record.proof.tasks, trainings) == (True, (1,), 2)
    run = read_run(tmp_path)
    assert run.last.claim == run.records[-1]["claim"] == "exact, proved"
    verdict = verdict_of([run])
    assert (str(verdict), verdict.claim) == ("exact, proved", "exact, proved")
    assert "a retrained model has the same bits" in verdict.why


def test_a_metric_warns_of_other_bits():
    benchmark = with_unlearning(DIGITS, {1: [0]})
    references = References(in_pools, benchmark)
    strategy = learn(in_pools(evaluator=quiet(jsd_metrics(references))), benchmark, 2)
    with torch.no_grad():
        strategy.model.head(1).bias.add_(1e-3)
    with pytest.warns(UserWarning, match=r"task 1, .*first in heads\.1\.bias"):
        strategy.eval(benchmark.test_stream)
    assert unlearning_plugin(strategy).records[-1].claim == "approximate"


def test_a_signature_holds_for_the_record_without_its_proof():
    strategy, key = learn(in_pools(), DIGITS, 2), Ed25519PrivateKey.generate()
    before = strategy.unlearn([0])
    signed, record = before.sign(key), strategy.prove(in_pools, DIGITS)
    assert verify(signed, key.public_key()) == before != record
    assert verify(record.sign(key), key.public_key()) == UnlearningRecord.from_json(record.to_json()) == record
