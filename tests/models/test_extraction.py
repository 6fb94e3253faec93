"""A task's dense subnet: the masked model's logits, without the closed units, without this package."""

import copy
import subprocess
import sys
import textwrap

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision.models as tv
from avalanche.models import MTSlimResNet18, SimpleCNN, SlimResNet18
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, MBConvConfig

from avalanche_amnesia.models import (
    MLP,
    MaskedModel,
    ModelError,
    SubnetModel,
    UnknownTaskError,
    extract,
    subnet_report,
)


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.Sigmoid()),
    )


def vgg():
    net = tv.vgg11_bn(num_classes=10)
    net.classifier[0], net.classifier[3], net.classifier[6] = (
        nn.Linear(n, m) for n, m in ((512 * 49, 64), (64, 32), (32, 10))
    )
    return net


def small_efficientnet():
    blocks = [MBConvConfig(1, 3, 1, 32, 16, 1, 1.0, 1.0), MBConvConfig(6, 3, 2, 16, 24, 2, 1.0, 1.0)]
    return EfficientNet(blocks, dropout=0.0, last_channel=64)


def small_convnext():
    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 1)], layer_scale=1.0)


def small_vit():
    return tv.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=10)


def timm_vit():
    size = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=0, **size)


class Gated(nn.Module):
    """Branches, a depthwise convolution, concatenation, residual addition, a layer scale and a gate."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.near, self.far = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1, groups=4)
        self.by_unit = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        paths = torch.cat([self.near(x), self.far(x)], dim=1)
        x = x + self.scale * self.by_unit(paths)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[..., None, None]
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class MixedNorms(nn.Module):
    """Norms that mix units: groups that lose unlike numbers of channels, positions and channels together."""

    def __init__(self):
        super().__init__()
        self.a, self.group = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12)
        self.b, self.instance = nn.Conv2d(12, 6, 3), nn.InstanceNorm2d(6, affine=True)
        self.whole, self.c = nn.LayerNorm((6, 4, 4)), nn.Linear(96, 8)
        self.layer, self.rms, self.d = nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = F.gelu(self.group(self.a(x)))
        x = self.whole(F.elu(self.instance(self.b(x))))
        x = self.layer(self.c(x.flatten(1)))
        return self.d(self.rms(x) + torch.tanh(x))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.out = nn.Embedding(11, 6), nn.ConvTranspose1d(6, 5, 2, stride=2), nn.Conv1d(5, 4, 3)

    def forward(self, x):
        return F.softplus(self.out(torch.sigmoid(self.up(self.embed(x).transpose(1, 2))))).amax(-1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.recurrent, self.out = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(self.recurrent(torch.relu(self.inner(x)))[0][:, -1])


# name → (factory, shape of one input, keyword arguments of MaskedModel)
NETWORKS = {
    "mlp": (lambda: MLP(20, hidden=(16, 12), features=8), (20,), {}),
    "lenet": (lenet, (1, 28, 28), {"input_shape": (1, 28, 28)}),
    "vgg": (vgg, (3, 32, 32), {"classifier": "classifier.6"}),
    "resnet18": (tv.resnet18, (3, 64, 64), {"classifier": "fc"}),  # traced on other images than it is run on
    "resnet50": (tv.resnet50, (3, 32, 32), {"classifier": "fc"}),
    "resnet18 on the batch's statistics": (
        lambda: SlimResNet18(5, 8),
        (3, 32, 32),
        {"classifier": "linear", "norm": "batch"},
    ),
    "SlimResNet18": (lambda: SlimResNet18(5), (3, 32, 32), {"classifier": "linear"}),
    "MTSlimResNet18": (lambda: MTSlimResNet18(5), (3, 32, 32), {}),
    "SimpleCNN": (SimpleCNN, (3, 32, 32), {}),
    "mobilenet": (tv.mobilenet_v2, (3, 32, 32), {"classifier": "classifier.1"}),
    "densenet": (lambda: tv.DenseNet(8, (2, 2, 2), 16), (3, 64, 64), {"classifier": "classifier"}),
    "convnext": (small_convnext, (3, 64, 64), {"classifier": "classifier.2"}),
    "efficientnet": (small_efficientnet, (3, 64, 64), {"classifier": "classifier.1"}),
    "vit": (small_vit, (3, 16, 16), {"classifier": "heads.head", "input_shape": (3, 16, 16)}),
    "timm vit": (timm_vit, (3, 32, 32), {"input_shape": (3, 32, 32)}),
    "gated": (Gated, (3, 9, 9), {}),
    "mixed norms": (MixedNorms, (3, 8, 8), {"input_shape": (3, 8, 8)}),
    "tokens": (Tokens, (7,), {}),
    "frozen": (Recurrent, (5, 4), {"input_shape": (5, 4), "frozen": ["recurrent"]}),
    "task-owned": (Recurrent, (5, 4), {"input_shape": (5, 4), "task_owned": ["recurrent"]}),
}
RUN_WHOLE = {"vit", "timm vit", "mixed norms", "tokens", "frozen", "task-owned"}  # hold operations that no rule cuts
HALF, SPARSE, STARVED = 0, 1, 2


def embedding(model: MaskedModel, task: int, seed: int = 0) -> torch.Tensor:
    """Opens half of the units; a twentieth; half, but in each third layer one alone, and in a middle one none."""
    values = torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed + task))
    values -= 0.95 if task == SPARSE else 0.5
    if task == STARVED:
        layers = list(model.by_layer(values).values())
        for layer in layers[::3]:
            layer.fill_(-1.0)[-1] = 1.0
        layers[len(layers) // 2].fill_(-1.0)
    return values


@torch.no_grad()
def with_tasks(model: MaskedModel, tasks=(HALF, SPARSE, STARVED), seed: int = 0) -> MaskedModel:
    """Tasks with masks, heads, and norms of their own that learned something."""
    generator = torch.Generator().manual_seed(seed)
    for task in tasks:
        model.add_head(task, 4 + task)
        for name, value in (*model.own[str(task)].named_parameters(), *model.own[str(task)].named_buffers()):
            if value.is_floating_point():
                low = 0.5 if name.endswith("running_var") else -0.3
                value.add_(low + 0.6 * torch.rand(value.shape, generator=generator))
        model.start_task(task, embedding(model, task, seed))
        model.finish_task()
    return model.eval()


def trained(name: str, seed: int = 0) -> MaskedModel:
    make, _, options = NETWORKS[name]
    torch.manual_seed(seed)
    return with_tasks(MaskedModel(make(), **options), seed=seed)


def batch(name: str, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    if name == "tokens":
        return torch.randint(0, 11, (size, *NETWORKS[name][1]), generator=generator)
    return torch.randn(size, *NETWORKS[name][1], generator=generator)


@torch.no_grad()
def assert_same_logits(subnet, model, task, x):
    expected = model(x, task)
    assert expected.abs().max() > 1e-3  # there is something to compare
    error = (subnet(x) - expected).abs().max() / expected.abs().max().clamp_min(1.0)
    assert error <= 1e-6, float(error)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_logits_are_the_masked_model_s(name):
    model = trained(name)
    before = copy.deepcopy(model.state_dict())
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
    torch.manual_seed(0)
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
