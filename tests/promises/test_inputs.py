"""Inputs other than float tensors: integers for an embedding, mappings, own collate_fn; and labels of tasks."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from support import tiny
from support.small_networks import L, parts
from support.strategies import DIGITS, amnesiac, make, quiet, trained
from support.strategy_state import bits, unlearning_plugin
from torch import nn

from avalanche_amnesia import DisjointSubnets
from avalanche_amnesia.benchmarks import SplitDigits, UnlearningRequest, task_benchmark, with_unlearning
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.contrib.baselines import CLPUDERpp
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.evaluation import References, jsd_metrics, unlearned_accuracy_metrics
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import WSN, AdjustmentRule, AmnesiacHAT


def stream(dtype=torch.int64, **options):
    parts = [e.tensors for e in SplitDigits(n_train=400, n_test=200).train_stream[:3]]
    x = torch.cat([(x * 16).round().to(dtype).flatten(1) for x, _ in parts])
    y = torch.cat([y + 2 * task for task, (_, y) in enumerate(parts)])
    return task_benchmark((x, y), (x, y), [[0, 1], [2, 3], [4, 5]], **options)


def net():
    torch.manual_seed(0)
    layers = [nn.Embedding(17, 4), nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU()]
    made = nn.Sequential(*layers)
    made.features = 16
    return made


MASKED = {"wrap": partial(MaskedModel, input_shape=(64,)), "repair": RepairPlugin, "compensation": BackupPlugin}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_integers_stay_integers_and_bytes_are_images(dtype):
    experience = stream(dtype).train_stream[1]
    x, _ = experience.tensors
    assert x.dtype == torch.int64
    assert torch.equal(x, (SplitDigits(n_train=400, n_test=200).train_stream[1].tensors[0] * 16).round().flatten(1))
    assert experience.dataset[3][0].dtype == torch.int64
    assert torch.equal(experience.dataset[3][0], x[3])
    assert torch.equal(task_data(experience, torch.tensor([5]))[0][0], x[5])
    assert stream(torch.uint8).train_stream[1].tensors[0].dtype == torch.float32


@pytest.mark.parametrize("kind", [AmnesiacHAT, DisjointSubnets, WSN, CLPUDERpp])
def test_tokens_are_learned_and_unlearned(kind):
    benchmark = with_unlearning(stream(), permanent=[0] if kind is CLPUDERpp else ())
    strategy = make(kind, net=net, train_mb_size=20, train_epochs=4, **(MASKED if kind is AmnesiacHAT else {}))
    model = strategy.model
    strategy.train(benchmark.train_stream)
    record = strategy.unlearn([1])
    assert model.tasks == (0, 2)
    assert record.claim == "exact" or kind is not DisjointSubnets
    x, y = benchmark.train_stream[2].tensors
    model.eval()
    assert float((model(x, 2).argmax(1) == y).float().mean()) > 0.65


# Mappings, and functions that put items together ----------------------------------------------------------------------


def read(s, ids, mask):
    seen = mask.unsqueeze(-1)
    return torch.relu(s.layer((s.embedding(ids) * seen).sum(1) / seen.sum(1)))


def sentence(generator, y):
    ids = torch.randint(7, (5,), generator=generator)
    return {"ids": ids, "mask": torch.ones(5), "label": y}


def of_tokens(kind, **options):
    example = {"ids": torch.zeros(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5)}
    wrap = partial(MaskedModel, example=example) if kind == "amnesiac" else None
    net = parts(read, embedding=lambda: nn.Embedding(7, 6), layer=L(6, 6), features=lambda: 6)
    return tiny.strategy(kind, net=net, wrap=wrap, **options)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_mappings_reach_the_network_by_their_names(kind):
    data = tiny.items(sentence)
    benchmark = with_unlearning(task_benchmark(data, data, [[0, 1], [1, 0]]), {1: [0]})
    references = References(lambda **options: of_tokens(kind, **options), benchmark)
    compared = [*jsd_metrics(references), *unlearned_accuracy_metrics(benchmark, references)]
    strategy = of_tokens(kind, evaluator=quiet(*accuracy_metrics(stream=True), *compared))
    strategy.train(benchmark.train_stream)
    results = strategy.eval(benchmark.test_stream)
    assert strategy.model.tasks == (1,)
    assert any(name.startswith("JSD") for name in results)
    assert any("UnlearnedAccuracy" in name for name in results)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_data_set_s_own_collate_fn_is_used(kind):
    def padded(items):
        return torch.stack([x.mean(0) for x, _ in items]), [y for _, y in items]

    data = tiny.items(lambda g, y: (torch.randn(3 + 2 * y, 8, generator=g), y), collate_fn=padded)
    strategy = tiny.strategy(kind)
    benchmark = tiny.tasks([[0, 1], [1, 0]], data)
    strategy.train(benchmark.train_stream)
    strategy.eval(benchmark.test_stream)
    strategy.unlearn([0])
    assert strategy.model.tasks == (1,)


LABELS = [np.int64, torch.tensor]
NO_LABELS = [True, np.float64(1), torch.tensor(True), torch.tensor([1])]


@pytest.mark.parametrize("label", LABELS)
def test_requests_take_any_integer(label):
    strategy, expected = trained(3, train_epochs=1), trained(3, train_epochs=1)
    assert strategy.plan_unlearning([label(1)]).tasks == (1,)
    strategy.mark_permanent([label(0)])
    assert unlearning_plugin(strategy).ledger.permanent == {0}
    record, plain = strategy.unlearn([label(1)]), expected.unlearn([1])
    assert json.loads(record.to_json())["plan"] == json.loads(plain.to_json())["plan"]
    assert bits(strategy.model) == bits(expected.model)
    x = DIGITS.test_stream[0].tensors[0]
    strategy.model.eval()
    assert torch.equal(strategy.model(x, label(0)), strategy.model(x, 0))


@pytest.mark.parametrize("label", LABELS)
def test_streams_take_any_integer(label):
    n = label(4)
    ours = with_unlearning(DIGITS, {label(1): [label(0)]}, permanent=[label(2)], deadline=n).train_stream
    plain = with_unlearning(DIGITS, {1: [0]}, permanent=[2], deadline=4).train_stream
    told = [[(e.requests, e.permanent, e.deadline) for e in stream] for stream in (ours, plain)]
    assert told[0] == told[1]
    assert repr(told[0]) == repr(told[1])  # by Python's own ints
    request = UnlearningRequest((label(0),), label(2), "iteration", label(3))
    assert repr(request) == repr(UnlearningRequest((0,), 2, "iteration", 3))


@pytest.mark.parametrize("label", NO_LABELS, ids=repr)
def test_what_is_no_label_changes_nothing(label):
    strategy = trained(3, train_epochs=1)
    before, ledger = bits(strategy.model), unlearning_plugin(strategy).ledger.state_dict()
    for ask in (strategy.plan_unlearning, strategy.unlearn):
        with pytest.raises(RequestError, match=r"are no tasks; give a list of ints, such as \[0, 2\]"):
            ask([label])
    with pytest.raises(RequestError, match=r"declaring permanent: .* are no tasks; .* \[0, 2\]"):
        strategy.mark_permanent([label])
    with pytest.raises(RequestError, match="are no tasks"):
        with_unlearning(DIGITS, {1: [label]})
    with pytest.raises(RequestError, match=r"permanent.* are no task labels; give a list of ints"):
        with_unlearning(DIGITS, permanent=[label])
    with pytest.raises(RequestError, match="deadline"):
        with_unlearning(DIGITS, deadline=label)
    with pytest.raises(ValueError, match=r"locked.* are no task labels; give a list of ints"):
        AdjustmentRule(locked=[label])
    with pytest.raises(ReferencesError, match="are no tasks; give a list of ints"):
        References(lambda **options: amnesiac(train_epochs=1, **options), DIGITS).reference([label])
    assert (bits(strategy.model), unlearning_plugin(strategy).ledger.state_dict()) == (before, ledger)
