"""Findings about a backbone: refusals name the part, the reason and a way out; descriptions, repairs and inputs."""

import copy
import re

import pytest
import torch
from support import tiny
from support.small_networks import C, Choosing, L, Net, P, last_state, layers, network, parts
from support.strategy_state import same_state
from torch import nn
from torch.nn.utils import parametrizations

from avalanche_amnesia import DisjointModel, MaskedModel, ModelError, SubnetModel, fix, validate
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


GENERATOR = torch.Generator()


def linears(forward, **more):
    return parts(forward, a=L(6, 4), b=L(4, 4), **more)


def in_place_through_a_part(s, x):
    h = torch.tanh(s.a(x))
    h.chunk(2, 1)[0].sigmoid_()
    return s.b(h)


def into_other_memory(s, x):
    h = torch.tanh(s.a(x))
    torch.mul(s.d(x), 2, out=h)
    return s.b(h)


def counts_up(s, x):
    s.n.add_(1)
    return s.b(s.a(x) * s.n)


def folded(s, x):
    return s.d(torch.sigmoid(s.a(x)).view(-1, 2)).view(-1, 4)


def sparse():
    return nn.Embedding(9, 4, sparse=True)


BITS = r"view\(torch.int32\) reads the bits of numbers as another type"
RANDOM = "draws random numbers in evaluation mode too"
SPECTRAL = layers(lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), L(4, 3))
SPARSE = "Embedding '0' of Sequential has sparse=True.*sparse=False"
CONTROL_FLOW = r"Choosing '1' of Sequential can't be exported.*control flow.*frozen=\['1'\]"
# name → (factory, words of the message, options)
REFUSED = {
    "lstm": (layers(L(6, 4), lambda: nn.LSTM(4, 4)), "returns a tuple with 3 tensors"),
    "unused layer": (linears(lambda s, x: s.a(x)), r"b\.weight.*b\.bias.*no mask would protect.*fix\(model\)"),
    "control flow inside": (layers(L(6, 4), Choosing), CONTROL_FLOW),
    "parameter past the masks": (linears(lambda s, x: s.b(s.a(x) * s.g.data), g=P(4)), "be exported"),
    "clamped": (linears(lambda s, x: s.b(torch.clamp(s.a(x), min=s.g)), g=P(4)), "'clamp'.*given parameters"),
    "in place through a part": (linears(in_place_through_a_part), "modified inplace"),
    "into other memory": (linears(into_other_memory, d=L(6, 4)), "out=|no mask would protect"),
    "buffer counted up": (linears(counts_up, n=lambda: torch.ones(4)), "writes to buffer 'n'"),
    "spectral norm": (SPECTRAL, "bake the parametrisation in"),
    "in a list": (linears(lambda s, x: s.b(s.a(x)) * s.l[0], l=lambda: [P(4)()]), "learns and is no parameter"),
    "two inputs": (lambda: nn.Bilinear(6, 6, 4), r"no input was found|2 inputs"),
    "map output": (layers(C(1, 2, 3)), r"returns values of shape.*flatten or average"),
    "samples compared": (linears(lambda s, x: s.b(s.a(x)) @ s.a(x).T), "depends on the size of the batch"),
    "mean over samples": (linears(lambda s, x: s.b(s.a(x)) - s.a(x).mean(0)), "samples of a batch"),
    "concatenated samples": (linears(lambda s, x: s.b(s.a(torch.cat([x, x])))), "changes the first dimension"),
    "folded": (parts(folded, a=L(6, 4), d=L(2, 2)), "units and samples lie on one axis.*axis of their own"),
    "sparse gradients": (layers(sparse, nn.Flatten, L(32, 4)), SPARSE, {"input_shape": (8,)}),
    "bits": (linears(lambda s, x: s.b(s.a(x).view(torch.int32).view(torch.float32))), f"'view'.*{BITS}; convert them"),
    "noise": (linears(lambda s, x: s.b(s.a(x) * torch.rand(4))), f"'rand'.*{RANDOM}.*nn.Dropout"),
    "noise of a generator": (
        linears(lambda s, x: s.b(s.a(x) * torch.rand(4, generator=GENERATOR))),
        r"draws from a torch\.Generator of its own.*leave generator= out",
    ),
    "several outputs": (linears(lambda s, x: (s.a(x), s.b(s.a(x)))), "returns a tuple with 2 tensors"),
    "unknown width": (layers(C(1, 2, 3), nn.Flatten), "depends on the size.*input_shape="),
    "another shape": (layers(C(1, 2, 3), nn.Flatten), r"input of shape \(6,\)", {"input_shape": (6,)}),
    "nothing to mask": (layers(nn.Flatten, nn.ReLU), "no weighted layer to mask; use a Linear", {"input_shape": (6,)}),
    "widths that differ": (layers(L(6, 4), L(5, 4)), r"no input was found.*\[2, 4\] X \[5, 4\]"),
    "division by units": (linears(lambda s, x: 1 / s.b(s.a(x))), "'reciprocal'.*infinite; add a small"),
    "part of a norm frozen": (
        layers(L(4, 6), lambda: nn.LayerNorm(6), nn.ReLU),
        "a norm can't be frozen in part",
        {"frozen": ["1.weight"]},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsafe_backbone_is_refused_and_not_changed(name):
    make, message, *options = REFUSED[name]
    torch.manual_seed(0)
    backbone = make().train()
    next(backbone.modules()).eval()  # a mode of its own
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    modes = [module.training for module in backbone.modules()]
    if name == "part of a norm frozen":
        with pytest.raises(ModelError, match=message):
            MaskedModel(backbone, **dict(*options))
    else:  # MaskedModel raises the first one
        findings = validate(backbone, **dict(*options))
        assert re.search(message, str(findings[0]))
        assert all(finding.where and finding.reason and finding.fix for finding in findings)
    assert modes == [module.training for module in backbone.modules()]
    assert all(torch.equal(value, state[key]) for key, value in backbone.state_dict().items())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in backbone.modules())


def test_a_whole_norm_may_be_frozen():
    backbone = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU())
    assert MaskedModel(backbone, frozen=["1"]).graph.frozen == {"1.weight", "1.bias"}


# Messages around torch's own -----------------------------------------------------------------------------------------


class Asserts(tiny.Net):
    def forward(self, x):
        assert not torch.isnan(x).any()
        return super().forward(x)


def test_a_refusal_of_control_flow_prints_nothing_of_torch(capfd):
    told = "can't be exported by torch.export .*, at 'assert not torch.isnan.*control flow.*DisjointModel.*SubnetModel"
    with pytest.raises(ModelError, match=told):
        MaskedModel(Asserts())
    (finding,) = validate(Asserts(), (8,))
    assert "control flow" in finding.reason
    fix(Asserts(), (8,))
    assert capfd.readouterr() == ("", "")


NOT_EXPORTED = {
    "deepcopy": (copy.deepcopy, r"can't be exported by torch.export .*deepcopy protocol"),
    "numpy": (lambda h: torch.from_numpy(h.detach().numpy()), r"can't be exported by torch.export .*numpy"),
    "item": (lambda h: h * h.mean().item(), r"no shape that could be known in advance \(it depends on values\)"),
}


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_a_forward_that_can_not_be_exported_is_refused(name):
    between, message = NOT_EXPORTED[name]
    with pytest.raises(ModelError, match=message):
        MaskedModel(linears(lambda s, x: s.b(between(s.a(x))))())


COMPILED = {
    "script": (torch.jit.script, "the backbone was compiled by torch.jit"),
    "trace": (lambda net: torch.jit.trace(net, torch.zeros(2, 8)), "the backbone was compiled by torch.jit"),
    "inside": (lambda net: nn.Sequential(torch.jit.script(net)), "module '0' of Sequential was compiled by torch.jit"),
    "parallel": (nn.DataParallel, r"the backbone is a DataParallel.*its \.module"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_or_parallel_network_is_refused(name):
    make, message = COMPILED[name]
    for wrap, options in ((MaskedModel, {}), (SubnetModel, {"n_features": 6}), (DisjointModel, {"n_features": 6})):
        with pytest.raises(ModelError, match=message):
            wrap(make(tiny.Net()), **options)


@pytest.mark.parametrize(("kind", "wrap"), [(nn.LSTM, MaskedModel), (nn.LSTM, SubnetModel), (nn.GRU, SubnetModel)])
def test_the_refusal_of_a_recurrent_network_names_the_methods_that_accept_it(kind, wrap):
    made = parts(last_state, r=lambda: kind(8, 6, batch_first=True), out=L(6, 6), features=lambda: 6)
    with pytest.raises(ModelError, match=r"DisjointModel\(backbone\)"):
        wrap(made(), **({"input_shape": (5, 8)} if wrap is MaskedModel else {}))
    DisjointModel(made())
    net = made()
    net.r.requires_grad_(False)
    SubnetModel(net)
