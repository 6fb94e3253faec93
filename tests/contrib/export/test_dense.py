"""A task's dense subnet: the masked model's logits, without the closed units, without this package."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from avalanche.models import SlimResNet18
from hypothesis import given, settings
from hypothesis import strategies as st
from support.export_networks import HALF, NETWORKS, RUN_WHOLE, batch, embedding, trained, with_tasks
from support.strategy_state import state
from torch import nn

from avalanche_amnesia.contrib.export import extract, subnet_report
from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel, UnknownTaskError
from avalanche_amnesia.unit_graph import ModelError


@torch.no_grad()
def assert_same_logits(subnet, model, task, x):
    expected = model(x, task)
    assert expected.abs().max() > 1e-3  # there is something to compare
    error = (subnet(x) - expected).abs().max() / expected.abs().max().clamp_min(1.0)
    assert error <= 1e-6, float(error)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_logits_are_the_masked_model_s(name):
    model = trained(name)
    before = state(model)
    for task in model.tasks:
        subnet = extract(model, task)
        assert not subnet.training
        for size in (1, 4):
            assert_same_logits(subnet, model, task, batch(name, size))
        assert name in RUN_WHOLE or subnet.meta["whole"] == {}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(name=st.sampled_from(["gated", "mixed norms", "tokens", "lenet", "vit"]), seed=st.integers(0, 1000))
def test_any_mask(name, seed):
    """In double precision: norms over one or two units that are nearly equal magnify how float32 rounds."""
    model, x = trained(name, seed).double(), batch(name, 2)
    x = x.double() if x.is_floating_point() else x
    for task in model.tasks:
        with torch.no_grad():
            assert torch.allclose(extract(model, task)(x), model(x, task), rtol=1e-10, atol=1e-10)


def test_closed_units_are_gone():
    model = trained("lenet")
    for task in model.tasks:
        open_ = [max(1, int(mask.sum())) for mask in model.masks[task].values()]
        pixels = max(1, int(model.masks[task]["3"].sum())) * 25
        subnet = extract(model, task)
        shapes = [tuple(p.shape[:2]) for name, p in subnet.named_parameters() if name.endswith("weight")]
        into = [1, open_[0], pixels, *open_[2:4]]
        assert shapes == list(zip([*open_, 4 + task], into, strict=True))


def test_units_of_a_depthwise_layer_go_with_their_input():
    model = trained("mobilenet")
    subnet = extract(model, HALF)
    depthwise = [m for m in subnet.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(depthwise) == 17
    open_ = model.masks[HALF]["features.0.0"].sum()
    assert depthwise[0].weight.shape == (open_, 1, 3, 3)
    assert depthwise[0].groups == open_


def test_norms_of_single_channels_are_folded():
    subnet = extract(trained("resnet18"), HALF)
    kinds = {type(module) for module in subnet.modules()}
    assert nn.BatchNorm2d not in kinds
    assert {kind.__module__.split(".")[0] for kind in kinds - {type(subnet)}} == {"torch"}


def test_nothing_is_shared_with_the_model():
    model, x = trained("SlimResNet18"), batch("SlimResNet18", 3)
    subnet = extract(model, HALF)
    expected = model(x, HALF)
    with torch.no_grad():
        for value in (*subnet.parameters(), *subnet.buffers()):
            value.zero_()
    assert torch.equal(model(x, HALF), expected)


def test_a_subnet_can_be_trained_on():
    model, x = trained("gated"), batch("gated", 8)
    subnet = extract(model, HALF)
    optimizer = torch.optim.SGD(subnet.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(subnet(x), torch.arange(8) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_double_precision_stays():
    model = trained("gated").double()
    subnet = extract(model, HALF)
    x = batch("gated", 2).double()
    assert torch.allclose(subnet(x), model(x, HALF), atol=1e-14)


WITHOUT_THE_PACKAGE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("avalanche_amnesia", "avalanche"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
for name in sys.argv[1:]:
    subnet = torch.export.load(f"{name}.pt2").module()
    for x, expected in torch.load(f"{name}.pt"):
        error = (subnet(x) - expected).abs().max() / expected.abs().max().clamp_min(1.0)
        assert error <= 1e-6, (name, float(error))
try:
    import avalanche_amnesia
except ImportError as error:
    print(error)
"""


def test_exported_it_runs_without_this_package(tmp_path):
    names = ["SlimResNet18", "vit", "mixed norms"]
    for name in names:
        model = trained(name)
        dynamic = ({0: torch.export.Dim("batch", min=1, max=1024)},)
        program = torch.export.export(extract(model, HALF), (batch(name, 2),), dynamic_shapes=dynamic)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        with torch.no_grad():
            pairs = [(batch(name, size), model(batch(name, size), HALF)) for size in (1, 2, 7)]
        torch.save(pairs, tmp_path / f"{name}.pt")
    script = [sys.executable, "-c", textwrap.dedent(WITHOUT_THE_PACKAGE), *names]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "avalanche_amnesia is blocked"


def test_report():
    model = with_tasks(MaskedModel(MLP(10, hidden=(8,), features=4)), tasks=(HALF,))
    a, b = (int(mask.sum()) for mask in model.masks[HALF].values())
    report = subnet_report(model, HALF)
    assert report.masked_parameters == 11 * 8 + 9 * 4 + 5 * 4
    assert report.subnet_parameters == 11 * a + (a + 1) * b + (b + 1) * 4
    assert report.masked_flops == 2 * (10 * 8 + 8 * 4 + 4 * 4)
    assert report.subnet_flops == 2 * (10 * a + a * b + b * 4)
    assert report.parameter_share == report.subnet_parameters / report.masked_parameters
    assert f"{report.flop_share:.1%}" in str(report)


def test_a_report_counts_a_task_s_own_norms_once():
    model = trained("SlimResNet18")
    report = subnet_report(model, HALF)
    plain = sum(p.numel() for name, p in SlimResNet18(4).named_parameters() if not name.startswith("linear"))
    head = sum(p.numel() for p in model.head(HALF).parameters())
    assert report.masked_parameters == plain + head
    assert 0 < report.flop_share < 0.5


def test_what_has_no_subnet_is_refused():
    model = with_tasks(MaskedModel(MLP(10, hidden=(8,), features=4)), tasks=(1,))
    with pytest.raises(UnknownTaskError, match=r"task 7 has no head.*\[1\]"):
        extract(model, 7)
    model.add_head(2, 3)
    with pytest.raises(UnknownTaskError, match=r"task 2 was trained without a mask.*\[1\]"):
        extract(model, 2)
    model.start_task(2, embedding(model, 2))
    with pytest.raises(ValueError, match="task 2 is in training"):
        extract(model, 2)
    model.drop_current_task()
    model.remove_task(1)
    with pytest.raises(UnknownTaskError, match="task 1 has no head"):
        subnet_report(model, 1)
    with pytest.raises(ModelError, match="SubnetModel has no masks over units"):
        extract(SubnetModel(MLP(10, hidden=(8,), features=4)), 0)
