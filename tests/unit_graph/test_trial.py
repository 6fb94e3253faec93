"""The trial at construction catches a rule that says too little, and names the operation."""

import pytest
import torch
from torch import nn

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import ModelError, tracing
from avalanche_amnesia.unit_graph.tracing import Known
from avalanche_amnesia.unit_graph.walk import RULES


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.a(x)).cumsum(1))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Every backbone is read anew, also after a rule was changed."""
    monkeypatch.setattr(tracing, "_known", Known(32))


def test_a_wrong_rule_is_caught_and_its_operation_named(monkeypatch):
    monkeypatch.setitem(RULES, torch.ops.aten.cumsum, lambda walk, node, x, dim, **options: x)
    with pytest.raises(ModelError, match=r"features of one task moved.*first in operation 'cumsum'.*cumsum\(1\)"):
        MaskedModel(Summed())
    untried = MaskedModel(Summed(), trial=False)
    assert "not tried out (trial=False)" in " ".join(str(untried.describe()).split())


def test_the_right_rule_passes_and_the_description_says_so():
    model = MaskedModel(Summed())
    assert model.describe().tried
    assert "tried out in both modes" in " ".join(str(model.describe()).split())


def test_the_trial_changes_nothing():
    backbone = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    state = {name: value.clone() for name, value in backbone.state_dict().items()}
    before = torch.random.get_rng_state()
    model = MaskedModel(backbone)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())
    assert all(module.training for module in backbone.modules())
    assert model.backbone.training


class Counting(nn.Module):
    """Computes something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(6, 4), [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.a(x) + self.calls[0]


def test_a_forward_that_differs_from_call_to_call_is_refused():
    with pytest.raises(ModelError, match="something else than its forward"):
        MaskedModel(Counting())
