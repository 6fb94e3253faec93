"""Masked entries are +0, so a network can't read even the sign of another task's entries."""

import pytest
import torch
from support.small_networks import Net, parameter
from torch import nn

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


def reads_signs(norm, scaled=False):
    def forward(s, x):
        h = s.norm(s.first(x))
        if scaled:
            h = h * s.scale
        return torch.copysign(torch.ones_like(h), h) + torch.atan2(h, -torch.ones_like(h))

    scale = {"scale": parameter(8)} if scaled else {}
    return Net(forward, first=nn.Linear(6, 8), norm=NORMS[norm](), features=8, **scale)


CASES = [*((norm, False, True) for norm in NORMS), ("none", True, False), ("batch", True, False)]


@pytest.mark.parametrize(("norm", "scaled", "training"), CASES)
def test_the_sign_of_a_closed_unit_reaches_no_task(norm, scaled, training):
    model = MaskedModel(reads_signs(norm, scaled))
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
    def reads_weights(s, x):
        return s.first(x) + torch.copysign(torch.ones(8), s.first.weight.amin(1))

    model = SubnetModel(Net(reads_weights, first=nn.Linear(6, 8), features=8), density=0.3)
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
