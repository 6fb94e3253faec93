"""One tiny network of every family, and real data of the shape that it reads."""

import functools
import io
import itertools

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision import models as zoo
from torchvision.models import mobilenetv3
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from avalanche_amnesia import MLP, task_benchmark
from avalanche_amnesia.contrib.streams.image_sets import load_idx

# Images -----------------------------------------------------------------------------------------------------------


@functools.cache
def cifar(root, n: int = 600):
    """The first CIFAR-10 (JPEG q75) images, ``(n, 3, 32, 32)`` in [0, 1], and labels."""
    with np.load(root / "cifar10-jpeg" / "cifar10_jpeg.npz", allow_pickle=False) as file:
        offsets, y = file["train_offsets"][: n + 1], file["train_labels"][:n]
        bytes_ = file["train_jpeg"][: offsets[-1]].tobytes()
    images = [np.array(Image.open(io.BytesIO(bytes_[a:b]))) for a, b in itertools.pairwise(offsets)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(y).long()


def images(root, side: int):
    x, y = cifar(root)
    return (F.interpolate(x, side, mode="area") - 0.5) * 4, y


@functools.cache
def mnist(root, side: int = 8, n: int = 600):
    """The first MNIST images, ``(n, 1, side, side)`` in [0, 1], and labels."""
    (x, y), _ = load_idx("MNIST", root, download=False)
    return F.interpolate(x[:n].float() / 255, side, mode="area"), y[:n]


class Tokens(torch.utils.data.Dataset):
    """MNIST as sequences of 64 grey levels: token ids, which no float tensor can hold."""

    def __init__(self, root, n: int) -> None:
        x, y = mnist(root)
        self.x, self.targets = (x[:n].flatten(1) * 16).round().long(), y[:n].tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.targets[i]


def stream(root, shape, *, n_tasks: int = 3, per_task: int = 40):
    """A benchmark of tasks of two classes each, some images of each."""
    classes = [[2 * task, 2 * task + 1] for task in range(n_tasks)]
    if shape == "tokens":
        return task_benchmark(Tokens(root, 200), Tokens(root, 100), classes)
    if shape[0] == 3:
        x, y = images(root, shape[-1])
    elif shape[:2] == (1, 3):
        x, y = images(root, shape[-1])
        x = x[:, None]
    else:
        x, y = mnist(root, 28 if shape[-1] == 28 else 8)
        x = x.reshape(-1, *shape) * 3 - 1
    chosen = torch.cat([(torch.isin(y, torch.tensor(pair))).nonzero()[:per_task, 0] for pair in classes])
    return task_benchmark((x[chosen], y[chosen]), (x[chosen], y[chosen]), classes)


# Networks ---------------------------------------------------------------------------------------------------------


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(400, 120), nn.Linear(120, 84)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return torch.tanh(self.fc2(F.relu(self.fc1(x))))


def vgg() -> nn.Module:
    layers, channels = [], 3
    for width in (8, "M", 12, 12, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU(inplace=True))
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 24), nn.ReLU(), nn.Linear(24, 16))


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class SmallImageResNet(nn.Module):
    """As for CIFAR: a 3×3 stem without pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2))

    def forward(self, x):
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        return F.avg_pool2d(x, 8).view(x.size(0), -1)


class NormNet(nn.Module):
    """A convolution net with one kind of norm."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2), norm(8), nn.ReLU(), nn.Conv2d(8, 12, 3), norm(12), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )

    def forward(self, x):
        return self.body(x)


class UpAndDown(nn.Module):
    """A small U: convolution, transposed convolution, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 2, stride=2)
        self.middle, self.up = nn.Conv2d(6, 8, 3, padding=1), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out, self.last = nn.Conv2d(7, 4, 3, padding=1), nn.Linear(4 * 64, 12)

    def forward(self, x):
        h = F.relu(self.middle(F.relu(self.down(x))))
        h = torch.cat([F.relu(self.up(h)), x], 1)
        return self.last(F.relu(self.out(h)).flatten(1))


class TextTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.position = nn.Parameter(torch.randn(1, 64, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(self.embedding(x) + self.position).mean(1)


def mobilenet_v3() -> nn.Module:
    bottleneck = functools.partial(mobilenetv3.InvertedResidualConfig, width_mult=1)
    return mobilenetv3.MobileNetV3(
        [bottleneck(8, 3, 16, 8, True, "RE", 2, 1), bottleneck(8, 5, 24, 16, True, "HS", 1, 1)], 32, num_classes=4
    )


def efficientnet() -> nn.Module:
    block = functools.partial(MBConvConfig, width_mult=1.0, depth_mult=1.0)
    return EfficientNet([block(1, 3, 1, 32, 16, 1), block(4, 3, 2, 16, 24, 1)], dropout=0.2, num_classes=4)


def timm_model(name: str, **options):
    return timm.create_model(name, pretrained=False, num_classes=0, **options)


def avalanche_net(name: str, **options):
    import avalanche.models as avalanche_models

    return getattr(avalanche_models, name)(**options)


def slim_resnet(name: str):
    import avalanche.models.slim_resnet18 as slim

    if name == "MTSlimResNet18":
        return slim.MTSlimResNet18(nclasses=4, nf=4)
    return slim.SlimResNet18(nclasses=4, nf=4)


# name → (factory, shape of an input, options of MaskedModel)
FAMILIES = {
    "mlp": (lambda: MLP(64, hidden=(32,), features=16, dropout=0.1), (64,), {}),
    "lenet": (LeNet, (1, 28, 28), {"input_shape": (1, 28, 28)}),
    "vgg bn": (vgg, (3, 16, 16), {}),
    "resnet cifar": (SmallImageResNet, (3, 16, 16), {"input_shape": (3, 16, 16)}),
    "resnet basic": (lambda: ResNet(BasicBlock, [1, 1, 1, 1]), (3, 32, 32), {"classifier": "fc"}),
    "resnet bottleneck": (
        lambda: ResNet(Bottleneck, [1, 1, 1, 1], groups=2, width_per_group=4),
        (3, 32, 32),
        {"classifier": "fc"},
    ),
    "mobilenet v2": (
        lambda: zoo.MobileNetV2(
            width_mult=0.25, inverted_residual_setting=[[1, 16, 1, 1], [3, 24, 2, 2], [3, 32, 1, 2]]
        ),
        (3, 32, 32),
        {"classifier": "classifier"},
    ),
    "mobilenet v3": (mobilenet_v3, (3, 32, 32), {"classifier": "classifier"}),
    "shufflenet": (
        lambda: zoo.ShuffleNetV2([2, 2, 2], [8, 8, 16, 16, 32]),
        (3, 32, 32),
        {"classifier": "fc"},
    ),
    "densenet": (
        lambda: zoo.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2),
        (3, 32, 32),
        {"classifier": "classifier"},
    ),
    "convnext": (
        lambda: ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], stochastic_depth_prob=0.1),
        (3, 32, 32),
        {"classifier": "classifier.2"},
    ),
    "efficientnet": (efficientnet, (3, 32, 32), {"classifier": "classifier"}),
    "vit": (
        lambda: zoo.VisionTransformer(
            image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
        ),
        (3, 16, 16),
        {"classifier": "heads"},
    ),
    "swin": (
        lambda: zoo.SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.1),
        (3, 16, 16),
        {"classifier": "head", "task_owned": ["features.1.0.attn", "features.3.0.attn"]},
    ),
    "timm vit": (
        lambda: timm_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2
        ),
        (3, 16, 16),
        {},
    ),
    "timm convnext": (
        lambda: timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 16)),
        (3, 32, 32),
        {},
    ),
    "avalanche cnn": (
        lambda: avalanche_net("SimpleCNN", num_classes=4),
        (3, 32, 32),
        {"classifier": "classifier"},
    ),
    "multi-task slim resnet": (lambda: slim_resnet("MTSlimResNet18"), (3, 32, 32), {}),
    "conv1d": (
        lambda: nn.Sequential(
            *(nn.Conv1d(8, 12, 3), nn.BatchNorm1d(12), nn.GELU(), nn.Conv1d(12, 8, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32, 12)),
        ),
        (8, 8),
        {"input_shape": (8, 8)},
    ),
    "conv3d": (
        lambda: nn.Sequential(
            *(nn.Conv3d(1, 6, (1, 3, 3), stride=2), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 8, (2, 3, 3))),
            *(nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
        ),
        (1, 3, 16, 16),
        {"input_shape": (1, 3, 16, 16)},
    ),
    "transposed, first": (
        lambda: nn.Sequential(
            *(nn.ConvTranspose1d(8, 12, 3, stride=2), nn.ReLU(), nn.ConvTranspose1d(12, 6, 2, groups=2), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(2), nn.Flatten()),
        ),
        (8, 8),
        {"input_shape": (8, 8)},
    ),
    "transposed": (UpAndDown, (1, 8, 8), {"input_shape": (1, 8, 8)}),
    "group norm": (lambda: NormNet(lambda n: nn.GroupNorm(2, n)), (3, 16, 16), {}),
    "instance norm": (
        lambda: NormNet(lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)),
        (3, 16, 16),
        {},
    ),
    "text transformer": (TextTransformer, "tokens", {"input_shape": (64,)}),
}
