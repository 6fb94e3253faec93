"""Task labels may be integers of numpy or torch, but never bools or floats."""

import json

import numpy as np
import pytest
import torch
from support.strategies import DIGITS, amnesiac, trained
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.evaluation import References
from avalanche_amnesia.evaluation.references import ReferencesError
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.training import AdjustmentRule

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
        with pytest.raises(RequestError, match=r"is no task; tasks are ints, not .* such as \[0, 2\]"):
            ask([label])
    with pytest.raises(RequestError, match=r"declaring permanent: .* is no task; tasks are ints, not .* \[0, 2\]"):
        strategy.mark_permanent([label])
    with pytest.raises(RequestError, match="is no task"):
        with_unlearning(DIGITS, {1: [label]})
    with pytest.raises(RequestError, match="is unknown; the stream trains the tasks 0, 1"):
        with_unlearning(DIGITS, permanent=[label])
    with pytest.raises(RequestError, match="deadline"):
        with_unlearning(DIGITS, deadline=label)
    with pytest.raises(ValueError, match="locked must be task labels"):
        AdjustmentRule(locked=[label])
    with pytest.raises(ReferencesError, match="are no tasks; give a list of ints"):
        References(lambda **options: amnesiac(train_epochs=1, **options), DIGITS).reference([label])
    assert (bits(strategy.model), unlearning_plugin(strategy).ledger.state_dict()) == (before, ledger)
