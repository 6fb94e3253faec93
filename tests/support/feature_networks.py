"""Networks of many kinds with tasks under random masks, for tests of features without some tasks."""

import torch
import torch.nn.functional as F
import torchvision.models as tv
from avalanche.models import MTSlimResNet18, SlimResNet18
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel
from support.network_families import FAMILIES

SMALL_FAMILIES = {"lenet", "vgg bn", "resnet bottleneck", "avalanche cnn", "densenet", "convnext", "efficientnet"}
SMALL_FAMILIES |= {"vit", "timm vit"}


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


# name → (factory, shape of one input, options of MaskedModel); large networks know the shape of their input
NETWORKS = {
    "mlp": (lambda: MLP(20, hidden=(16, 12), features=8), (20,), {}),
    "resnet18": (tv.resnet18, (3, 64, 64), {"classifier": "fc"}),  # traced on images of another size
    "resnet18 on the batch's statistics": (
        lambda: SlimResNet18(5, 8),
        (3, 32, 32),
        {"classifier": "linear", "norm": "batch"},
    ),
    "MTSlimResNet18": (lambda: MTSlimResNet18(5), (3, 32, 32), {"input_shape": (3, 32, 32)}),
    "mobilenet": (tv.mobilenet_v2, (3, 32, 32), {"classifier": "classifier.1", "input_shape": (3, 32, 32)}),
    "gated": (Gated, (3, 9, 9), {}),
    "mixed norms": (MixedNorms, (3, 8, 8), {"input_shape": (3, 8, 8)}),
    "tokens": (Tokens, (7,), {}),
    "frozen": (Recurrent, (5, 4), {"input_shape": (5, 4), "frozen": ["recurrent"]}),
    "task-owned": (Recurrent, (5, 4), {"input_shape": (5, 4), "task_owned": ["recurrent"]}),
    **{
        name: (make, shape, {**options, "input_shape": shape})
        for name, (make, shape, options) in FAMILIES.items()
        if name in SMALL_FAMILIES
    },
}
HALF, SPARSE, STARVED = 0, 1, 2


def embedding(model: MaskedModel, task: int, seed: int = 0) -> torch.Tensor:
    """Open half of the units, a twentieth, or half with one unit in every third layer and none in a middle layer."""
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
    """Give a model tasks with masks, heads, and norms that look trained."""
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
