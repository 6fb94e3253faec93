"""The benchmark of costs: measurements, table and figure on a small network."""

import gc
import math

import pytest
import torch

from avalanche_amnesia.models import MLP
from benchmarks.__main__ import draw, table
from benchmarks.measuring import live_bytes, measure
from benchmarks.networks import Network

TINY = Network(lambda: MLP(64, hidden=(16,), features=16), (64,), 16, batch=16, steps=16, epochs=1)


@pytest.fixture(scope="module", autouse=True)
def freeze_garbage_of_other_tests():
    """Counting live tensors collects garbage, which takes seconds among the objects of other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("method", ["Naive", "AmnesiacHAT, two shadows"])
def test_every_method_is_measured_and_has_a_row(method, tmp_path):
    found = measure(method, TINY, "sgd", batch=16, steps=16, rounds=1)
    assert found.keys() >= {"step", "loop", "evaluation", "start", "end", "memory", "subnormals"}
    assert ("trajectory" in found) == ("unlearn later" in found) == (method != "Naive")
    for name, figure in found.items():
        assert all(map(math.isfinite, figure))
        assert figure.low <= figure.median <= figure.high
        assert figure.median > 0 or name in ("memory", "end", "subnormals")
    rows = [{"title": "tiny", "method": method, **found}]
    written = table(rows, {"avalanche.training": 1.0})
    assert f"| {method} | {found['step']} |" in written
    assert "``step``: from zeroing gradients" in written
    draw(rows, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_tensors_of_an_earlier_training_are_not_counted():
    def leave_a_cycle():
        cycle = [torch.zeros(10**6)]
        cycle.append(cycle)

    before = live_bytes()
    leave_a_cycle()
    assert live_bytes() == before
