"""The benchmark of costs: measurements, table and figure on a small network."""

import gc
import math

import pytest
import torch
from torch import nn

from avalanche_amnesia.models import MLP
from benchmarks.__main__ import draw, table
from benchmarks.measuring import live_bytes, measure
from benchmarks.networks import Network
from benchmarks.place import Place

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


def conv_net():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.features = 8
    return net


def test_the_given_precision_and_layout_are_used(monkeypatch):
    seen, forward = [], nn.Conv2d.forward
    conv = Network(conv_net, (3, 8, 8), 8, batch=16, steps=4, epochs=1)
    place = Place(bfloat16=True, channels_last=True)

    def plain(self, x):
        seen.append(self.weight.is_contiguous())
        seen.append(x.is_contiguous())
        out = forward(self, x)
        seen.append(out.dtype is not torch.bfloat16)
        return out

    monkeypatch.setattr(nn.Conv2d, "forward", plain)
    torch.manual_seed(0)
    found = measure("AmnesiacHAT", conv, "sgd", batch=16, steps=4, rounds=1, place=place)
    assert found["step"].median > 0
    assert str(place) == "1 thread, bfloat16, channels last"
    # A masked network calls this function only while it is traced, in float32.
    assert seen.count(False) > seen.count(True)


def test_tensors_of_an_earlier_training_are_not_counted():
    def leave_a_cycle():
        cycle = [torch.zeros(10**6)]
        cycle.append(cycle)

    before = live_bytes()
    leave_a_cycle()
    assert live_bytes() == before
