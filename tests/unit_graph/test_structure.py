"""A backbone that is built like one before is not exported again; one that differs in anything that matters is."""

import functools

import pytest
import torch
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import tracing
from avalanche_amnesia.unit_graph.structure import Known


class Net(nn.Module):
    def __init__(self, width=4, bias=True, slope=0.1, order=(2, 0, 1, 3), function=torch.tanh) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, width, bias=bias), nn.Linear(width, 3)
        self.slope, self.function = slope, function
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return self.c(self.function(self.a(x) * self.slope)[:, self.order])


@pytest.fixture
def exports(monkeypatch):
    """Modes that were exported, each by itself or two at once: a list that grows."""
    monkeypatch.setattr(tracing, "_known", Known(2))
    modes, alone, together = [], tracing.export, tracing.export_both

    def both(*args):
        found = together(*args)
        modes.extend(found or ())
        return found

    monkeypatch.setattr(tracing, "export", lambda *args, **options: modes.append(options) or alone(*args, **options))
    monkeypatch.setattr(tracing, "export_both", both)
    return modes


def test_what_is_built_alike_is_known(exports):
    first = MaskedModel(Net())
    assert len(exports) == 2  # training and evaluation
    torch.manual_seed(3)
    second = MaskedModel(Net())  # other weights
    assert len(exports) == 2
    x, mask = torch.randn(5, 6), torch.ones(second.n_units)
    with torch.no_grad():
        expected = second.backbone.c(torch.tanh(second.backbone.a(x) * 0.1)[:, second.backbone.order])
    assert torch.allclose(second.eval().masked_features(x, mask), expected, atol=1e-6)
    assert not torch.equal(first.eval().masked_features(x, mask), second.masked_features(x, mask))


@pytest.mark.parametrize(
    "other",
    [
        {"width": 5, "order": (2, 0, 1, 3, 4)},
        {"bias": False},
        {"slope": 0.2},
        {"order": (0, 1, 2, 3)},
        {"function": torch.sigmoid},
        {"function": functools.partial(torch.clamp, max=1.0)},
    ],
)
def test_what_differs_is_read_anew(exports, other):
    MaskedModel(Net())
    MaskedModel(Net(**other))
    assert len(exports) == 4


def test_functions_with_arguments_given_beforehand_are_compared(exports):
    for limit, n_exports in ((1.0, 2), (1.0, 2), (2.0, 4)):
        MaskedModel(Net(function=functools.partial(torch.clamp, max=limit)))
        assert len(exports) == n_exports
    MaskedModel(Net(function=functools.partial(torch.clip, max=2.0)))
    assert len(exports) == 6


def test_options_and_closures_count_too(exports):
    MaskedModel(Net(), frozen=["a"])
    MaskedModel(Net(), task_owned=["a"])
    assert len(exports) == 4
    number = 2.0
    MaskedModel(Net(function=lambda h: h * number))
    MaskedModel(Net(function=lambda h: h * number))
    assert len(exports) == 8  # what a closure holds can't be compared


def test_only_the_latest_are_kept(exports):
    for slope in (0.1, 0.2, 0.3, 0.1):
        MaskedModel(Net(slope=slope))
    assert len(exports) == 8
