"""JSD and accuracy difference where nothing was unlearned, nothing differs, or a task has norms of its own."""

from copy import deepcopy

import pytest
import torch
from support.measured_runs import BENCHMARK, PERMUTED, TEST, make
from support.strategies import learn, quiet
from torch import nn

from avalanche_amnesia import AmnesiacHAT, MaskedModel, evaluation
from avalanche_amnesia.evaluation.probes import Probe, copy_probe


def test_there_is_no_ratio_to_a_floor_of_0(references):
    (metric,) = evaluation.jsd_metrics(references, probes=["own"])
    strategy = learn(make(evaluator=quiet(metric)), PERMUTED.train_stream[:2])
    strategy.unlearn([1], keep_probes=True)
    strategy.eval(TEST[:1])
    strategy.experience = TEST[0]  # an evaluation ends without one
    for remaining, there in (((), False), ((0,), True)):  # none: references of any order are the initial model
        emitted = {value.name.split("/")[0]: value.value for value in metric.values(strategy, (1,), remaining)}
        assert (emitted["JSD_own_floor_order"] > 0) == there
        assert ("JSD_own_ratio_order" in emitted) == (there and emitted["JSD_own"] > 0)


def test_full_models_exist_for_other_orders_and_for_a_relearned_task(references):
    strategy = make(evaluator=quiet(*evaluation.accuracy_difference_metrics(references, controls=())))
    stream = PERMUTED.train_stream
    for task in (2, 0, 3):
        strategy.train(stream[task])
        results = strategy.eval(TEST)
        differences = {value for name, value in results.items() if name.startswith("AccuracyDifference")}
        assert differences == {0.0}  # nothing was unlearned: it is the full model
    strategy.unlearn([2])
    strategy.train(stream[2])
    assert "AccuracyDifference/eval_phase/test_stream/Task002" in strategy.eval(TEST)


def test_jsd_uses_the_norms_of_a_task():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
    model = MaskedModel(net, input_shape=(1, 8, 8))
    strategy = AmnesiacHAT(model=model, optimizer=torch.optim.Adam(model.parameters()), train_mb_size=32, seed=0)
    reference = deepcopy(model)
    strategy.train(BENCHMARK.train_stream[0])
    x, _ = TEST[0].tensors
    probe = copy_probe(model, 0)
    model.eval()
    with torch.no_grad():
        seen = model.features(x, 0)
        through = reference.eval().masked_features(x, probe.mask, probe.parts)
    assert evaluation.jsd(model, reference, x, probe) == pytest.approx(
        float(evaluation.js_divergence(seen, through).mean())
    )
    bare = evaluation.jsd(model, reference, x, Probe(probe.mask, None))
    assert bare != pytest.approx(evaluation.jsd(model, reference, x, probe), rel=1e-3)
    strategy.unlearn([0])
    assert evaluation.jsd(model, reference, x, probe) == 0  # the same initial bits, through the same mask and norms
