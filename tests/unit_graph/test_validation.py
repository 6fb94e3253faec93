"""Reports on a backbone: its description, findings and repairs, and the inputs that it runs on."""

import copy

import pytest
import torch
from support.small_networks import Net, network
from support.strategy_state import same_state
from torch import nn
from torch.nn.utils import parametrizations

from avalanche_amnesia import MaskedModel, ModelError, fix, validate
from avalanche_amnesia.unit_graph.backbones import inputs_of

# In words ------------------------------------------------------------------------------------------------------


def test_the_description_of_a_small_network_lists_its_layers():
    description = network("three branches")[0].describe()
    assert description.rows == [
        ("a", "Linear", 3, ("input",), 21),
        ("b", "Linear", 2, ("input",), 14),
        ("c", "Linear", 4, ("input", "a", "b"), 48),
    ]
    assert description.shares == {"masked": 1.0, "per task": 0.0, "first task only": 0.0, "without gradients": 0.0}
    text = str(description)
    assert repr(description) == text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│ c " in line]
    assert lines == [["c", "Linear", "4", "input, a, b", "48"]]
    assert "9 units in 3 layers; 4 features; 83 parameters: masked 100.0%; traced on inputs of shape (6,)" in text


def test_a_description_counts_frozen_and_task_owned_parameters():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    description = MaskedModel(net, frozen=["2"]).describe()
    expected = {"masked": 40 / 64, "per task": 8 / 64, "first task only": 16 / 64, "without gradients": 0.0}
    assert description.shares == expected
    assert [row[0] for row in description.rows] == ["0", "3"]
    assert description.rows[1][3] == ("input",)  # frozen modules count as always used


# Findings ----------------------------------------------------------------------------------------


def test_validate_lists_all_findings_and_the_error_counts_them():
    own = {"a": nn.Linear(6, 4), "c": nn.Linear(4, 3), "unused": nn.Linear(2, 2)}
    own |= {name: nn.Parameter(torch.ones(4)) for name in ("g", "h")}
    net = Net(lambda s, x: s.c(s.a(x).relu().sqrt().clamp(min=s.g) + s.h), **own)
    findings = validate(net)
    assert [finding.where.split()[1] for finding in findings[:2]] == ["'sqrt'", "'clamp'"]
    assert "unused.weight" in findings[2].where
    assert str(findings[0]) == f"{findings[0].where}: {findings[0].reason}; {findings[0].fix}"
    with pytest.raises(ModelError, match=r"'sqrt'.*\(and 2 more: validate\(model\) lists them\)"):
        MaskedModel(net)
    assert validate(network("lenet")[0].backbone.get_submodule("0"), (1, 8, 8)) != []  # a map is no feature
    assert validate(nn.Sequential(nn.Linear(6, 4), nn.ReLU())) == []
    assert len(validate(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()))) == 1
    assert validate(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (1, 8, 8)) == []
    with pytest.raises(ValueError, match="norm must be one of"):
        validate(net, norm="none")


# Repairs -------------------------------------------------------------------------------------------------------


FIXED = {
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(5, 4))
    ),
    "modules never read": lambda: Net(
        lambda s, x: s.a(x), a=nn.Linear(6, 4), b=nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), c=nn.PReLU()
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_backbone_passes_and_computes_the_same(name):
    backbone, x = FIXED[name]().eval(), torch.randn(9, 6)
    state = copy.deepcopy(backbone.state_dict())
    with torch.no_grad():
        expected = backbone(x)
    assert validate(backbone) != []
    fixed = fix(backbone)
    assert validate(fixed) == []
    model = MaskedModel(fixed).eval()
    with torch.no_grad():
        for result in (fixed(x), model.masked_features(x, torch.ones(model.n_units)), backbone(x)):
            assert torch.allclose(result, expected, atol=1e-6)
    assert same_state(backbone.state_dict(), state)
    assert validate(backbone) != []  # fix changes a copy


def test_a_backbone_that_can_not_be_copied_or_run_is_not_fixed():
    net = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(6, 4)), nn.Tanh())
    with pytest.raises(ModelError, match=r"can't be copied.*by hand"):
        fix(net)
    with pytest.raises(ModelError, match="no input was found"):
        fix(nn.Sequential(nn.Linear(6, 4), nn.Bilinear(4, 4, 3)))


# Inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (lambda: nn.Linear(6, 4), (6,), torch.float32),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double(), (6,), torch.float64),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (3, 32, 32), torch.float32),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 3)), (1, 5, 5), torch.float32),
        (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(20, 3)), (2, 7), torch.float32),
        (lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.Flatten(), nn.Linear(32, 3)), (1, 4, 4, 4), torch.float32),
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(40, 3)), (10,), torch.int64),
        (lambda: Net(lambda s, x: s.a(x).mean(1), a=nn.Linear(6, 4)), (16, 6), torch.float32),
        (lambda: Net(lambda s, x: x @ s.w, w=nn.Parameter(torch.ones(6, 4))), (6,), torch.float32),
        (lambda: Net(lambda s, x: s.a(x) if x.sum() > 0 else s.a(-x), a=nn.Linear(6, 4)), (6,), torch.float32),
    ],
)
def test_an_input_is_found_and_the_backbone_is_not_changed(make, shape, dtype):
    backbone = make().train()
    state, rng = copy.deepcopy(backbone.state_dict()), torch.get_rng_state()
    assert (inputs_of(backbone, None).shape, inputs_of(backbone, None).dtype) == (shape, dtype)
    assert (inputs_of(backbone, shape).shape, inputs_of(backbone, shape).dtype) == (shape, dtype)
    assert all(module.training for module in backbone.modules())
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_module_under_two_names_keeps_its_parameters():
    layer = nn.Linear(6, 6)
    backbone = nn.Sequential(layer, nn.Tanh(), layer)
    assert inputs_of(backbone, None).shape == (6,)
    assert layer.weight.device.type == "cpu"
    assert backbone(torch.ones(2, 6)).isfinite().all()
