"""Masked entries are +0, so a network can't read even the sign of another task's entries."""

import pytest
import torch
from torch import Tensor, nn

from avalanche_amnesia.models import MaskedModel, SubnetModel

NORMS = {
    "batch": lambda: nn.BatchNorm1d(8),
    "batch without parameters": lambda: nn.BatchNorm1d(8, affine=False),
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "learned slopes": lambda: nn.PReLU(8),
    "none": nn.Identity,
}


class ReadsSigns(nn.Module):
    features = 8

    def __init__(self, norm: str, scaled: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), NORMS[norm]()
        self.scale = nn.Parameter(torch.randn(8)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if self.scale is not None:
            h = h * self.scale
        return torch.copysign(torch.ones_like(h), h) + torch.atan2(h, -torch.ones_like(h))


CASES = [*((norm, False, True) for norm in NORMS), ("none", True, False), ("batch", True, False)]


@pytest.mark.parametrize(("norm", "scaled", "training"), CASES)
def test_the_sign_of_a_closed_unit_reaches_no_task(norm, scaled, training):
    model = MaskedModel(ReadsSigns(norm, scaled))
    model.add_head(0, 2)
    model.start_task(0, torch.randn(model.n_units))
    model.finish_task()
    model.train(training)
    x, own = torch.randn(5, 6), model.task_parts(0)
    before = model.features(x, 0)
    use = model.graph.parameter_use(model.masks[0])
    with torch.no_grad():
        for name, parameter in model.backbone.named_parameters():
            if name in use:
                parameter.copy_(torch.where((use[name] > 0).expand_as(parameter), parameter, -3 * parameter))
    assert torch.equal(before.view(torch.int32), model.masked_features(x, model.binary_mask(0), own).view(torch.int32))


@pytest.mark.parametrize("training", [False, True])
def test_the_sign_of_a_weight_outside_the_subnetwork_reaches_no_task(training):
    class ReadsWeights(nn.Module):
        features = 8

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + torch.copysign(torch.ones(8), self.first.weight.amin(1))

    model = SubnetModel(ReadsWeights(), density=0.3)
    with torch.no_grad():
        model.backbone.first.weight.abs_()
    model.add_head(0, 2)
    model.start_task(0, torch.randn(model.n_weights))
    model.train(training)
    x = torch.randn(5, 6)
    before = model.features(x, 0).detach().clone()
    outside = ~model.by_layer(model.binary_mask(0))["first.weight"].view(8, 6)
    with torch.no_grad():
        model.backbone.first.weight[outside] *= -1
    model.open_subnet()
    assert torch.equal(before, model.features(x, 0))
