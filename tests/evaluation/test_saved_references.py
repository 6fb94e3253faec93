"""A strategy with its metrics is saved and loaded by another program, where references need their maker."""

import pickle
from copy import deepcopy
from functools import partial

import pytest
import torch
from support import strategies
from support.forked import run_script
from support.strategy_state import hashes
from torch.optim import Adam

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.evaluation import References
from avalanche_amnesia.evaluation.references import ReferencesError

BENCHMARK = with_unlearning(PermutedDigits(3, n_train=60, n_test=40), {1: [0]})
make = partial(strategies.make, hidden=(12,), features=8, optimizer=Adam, train_mb_size=20, train_epochs=1)

SAVES = """
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import InteractiveLogger
from avalanche.training.plugins import EvaluationPlugin
from torch.optim import Adam

from avalanche_amnesia import *
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.metrics import *
from avalanche_amnesia.evaluation import *

torch.set_num_threads(1)
benchmark = with_unlearning(PermutedDigits(3, n_train=60, n_test=40), {1: [0]})

def make_strategy(**kwargs):
    torch.manual_seed(0)
    model = MaskedModel(MLP(64, hidden=(12,), features=8))
    return AmnesiacHAT(model=model, optimizer=Adam(model.parameters()), train_mb_size=20, train_epochs=1, **kwargs)

references = References(make_strategy, benchmark)
strategy = make_strategy(evaluator=EvaluationPlugin(
    accuracy_metrics(experience=True, stream=True), capacity_metrics(), capacity_pictures_metrics(),
    jsd_metrics(references, noise_floor=()),
    accuracy_difference_metrics(references), unlearned_accuracy_metrics(benchmark, references),
    accuracy_matrix_metrics(), cost_metrics(references), distance_metrics(references, noise_floor=()),
    mask_overlap_metrics(), membership_metrics(benchmark, references), owners_metrics(),
    relapse_metrics(benchmark, references), loggers=[InteractiveLogger(), WandBLogger(mode="disabled")]))
for experience in benchmark.train_stream[:2]:
    strategy.train(experience)
    strategy.eval(benchmark.test_stream)
torch.save(strategy, "strategy.pt")
"""


def test_a_strategy_with_its_metrics_is_loaded_by_another_program(tmp_path):
    (tmp_path / "script.py").write_text(SAVES)
    run_script(tmp_path / "script.py")
    strategy = torch.load(tmp_path / "strategy.pt", weights_only=False)
    strategy.evaluator.loggers = []
    metrics = [metric for metric in strategy.evaluator.metrics if getattr(metric, "references", None) is not None]
    assert len({id(metric.references) for metric in metrics}) == 1
    results = strategy.eval(BENCHMARK.test_stream)  # of models that were trained before it was saved
    assert "JSD_own/eval_phase/test_stream" in results
    assert "UnlearnedAccuracy_reference/eval_phase/test_stream" in results
    strategy.train(BENCHMARK.train_stream[2])
    with pytest.raises(ReferencesError, match=r"loaded without make_strategy.*references.attach\(make_strategy\)"):
        strategy.eval(BENCHMARK.test_stream)
    metrics[0].references.attach(make)
    known = strategy.eval(BENCHMARK.test_stream)
    plain = References(make, BENCHMARK)
    assert hashes(metrics[0].references.reference([1, 2])) == hashes(plain.reference([1, 2]))
    assert "AccuracyDifference/eval_phase/test_stream" in known


def test_loaded_references_keep_their_models_and_continue_bit_for_bit():
    secret = 3
    references = References(lambda **options: make(seed=secret, **options), BENCHMARK)  # a lambda can't be pickled
    kept = references.reference([0, 1])
    loaded = pickle.loads(pickle.dumps(references))
    assert hashes(loaded.reference([0, 1])) == hashes(kept)
    assert loaded.seconds([0, 1]) == references.seconds([0, 1])
    with pytest.raises(ReferencesError, match="a model is asked for that was not trained before they were saved"):
        loaded.reference([1])
    loaded.attach(lambda **options: make(seed=secret, **options))
    assert hashes(loaded.reference([0, 1, 2])) == hashes(references.reference([0, 1, 2]))


def test_a_maker_of_other_models_is_refused():
    loaded = pickle.loads(pickle.dumps(References(make, BENCHMARK)))

    def other(**options):
        strategy = make(**options)
        with torch.no_grad():
            next(strategy.model.backbone.parameters()).add_(1)
        return strategy

    drawn = torch.get_rng_state()
    with pytest.raises(ReferencesError, match=r"other initial values of \['backbone.*than that with which these"):
        loaded.attach(other)
    with pytest.raises(ReferencesError, match="make_strategy=3 can't be called"):
        loaded.attach(3)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert loaded.make_strategy is None


def test_a_copy_of_references_is_the_same_object():
    references = References(make, BENCHMARK)
    assert deepcopy({"metric": references})["metric"] is references
