"""The same seed gives the same bits, also with evaluations, interruptions and refusals in between."""

import random

import numpy as np
import pytest
import torch
from avalanche.benchmarks import AvalancheDataset  # noqa: F401 - fails early where the host is broken
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import BaseLogger
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin
from support import strategies
from support.small_runs import OPTIMIZERS, make, masked_mlp, permuted
from support.strategies import learn
from support.strategy_state import same_state, state

from avalanche_amnesia.training import HAT, AdaHAT, AmnesiacHAT
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin


def metrics():
    return EvaluationPlugin(
        accuracy_metrics(minibatch=True, epoch=True, experience=True, stream=True),
        loss_metrics(minibatch=True, experience=True),
        forgetting_metrics(experience=True),
        loggers=[BaseLogger()],
    )


def streams():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


# Determinism --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdaHAT, AmnesiacHAT])
def test_the_same_seed_gives_the_same_bits_whatever_is_evaluated(kind):
    benchmark = permuted(2)
    expected = state(learn(make(kind, dropout=0.4), benchmark.train_stream).model)
    torch.manual_seed(99)

    def between(strategy):
        torch.rand(7), random.random(), np.random.rand(3)  # noqa: NPY002
        strategy.eval(benchmark.test_stream)

    for options in ({}, {"evaluator": metrics(), "eval_every": 1}, {"eval_every": 1, "peval_mode": "iteration"}):
        strategy = make(kind, dropout=0.4, **options)
        for experience in benchmark.train_stream:
            between(strategy)
            strategy.train(experience, eval_streams=[benchmark.test_stream[:1]])
            between(strategy)
            between(strategy)
        assert same_state(state(strategy.model), expected)
    assert not same_state(state(learn(make(kind, dropout=0.4, seed=4), benchmark.train_stream).model), expected)


def test_the_caller_s_random_streams_do_not_change():
    strategy, benchmark = make(dropout=0.3, evaluator=metrics()), permuted()
    torch.manual_seed(5)
    before = streams()
    learn(strategy, benchmark.train_stream[:2])
    assert streams() == before
    strategy.eval(benchmark.test_stream)
    assert streams() == before


@pytest.mark.parametrize("size", [1, 7, 20, 50])
@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, True)])
def test_tensor_batches_equal_those_of_a_data_loader(shuffle, drop_last, size):
    x, y = torch.randn(20, 3), torch.arange(20)
    data = torch.utils.data.TensorDataset(x, y)
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(data, size, shuffle=shuffle, drop_last=drop_last)
    expected = [batch for _ in range(2) for batch in loader]
    after = torch.get_rng_state()
    torch.manual_seed(1)
    ours = TensorBatches(x, y, 4, size, shuffle=shuffle, drop_last=drop_last)
    got = [batch for _ in range(2) for batch in ours]
    assert len(ours) == len(loader)
    assert len(got) == len(expected)
    for (a, b, t), (c, d) in zip(got, expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
        assert t.tolist() == [4] * len(a)
    assert torch.equal(torch.get_rng_state(), after)


# On stock strategies ------------------------------------------------------------------------------------------------


def test_the_plugin_on_a_stock_strategy_is_hat():
    benchmark = permuted()
    hat = learn(make(HAT, optimizer="adam decay", evaluator=metrics()), benchmark.train_stream)
    options = {"model": masked_mlp(), "optimizer": OPTIMIZERS["adam decay"], "train_mb_size": 16, "eval_mb_size": 64}
    naive = strategies.make(Naive, plugins=[SeedingPlugin(3), HATPlugin(seed=3)], evaluator=metrics(), **options)
    learn(naive, benchmark.train_stream, reset_optimizer_state=True)
    assert same_state(state(hat.model), state(naive.model))
    assert hat.eval(benchmark.test_stream) == naive.eval(benchmark.test_stream)


def test_evaluating_makes_no_heads_and_skips_future_tasks():
    strategy, benchmark = make(evaluator=metrics()), permuted()
    assert strategy.eval(benchmark.test_stream) == {}
    strategy.train(benchmark.train_stream[0])
    before = state(strategy.model)
    results = strategy.eval(benchmark.test_stream)
    assert [name for name in results if name.startswith("Top1_Acc_Exp")] == [
        "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
    ]
    assert strategy.eval(benchmark.test_stream[0])
    assert same_state(before, state(strategy.model))
