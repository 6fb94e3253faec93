"""Networks for the cost measurements, their optimizers, and tasks of handwritten digits to train them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models import MLP

N_CLASSES = 10


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def small_image_resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 without classifier, with the usual first layers for 32×32 images."""
    net = torchvision.models.resnet18()
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    return net


def small_transformer() -> nn.Module:
    """Return torchvision's VisionTransformer for 32×32 images, without classifier: ViT-Tiny's width 192, 4 layers."""
    net = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=3, hidden_dim=192, mlp_dim=768
    )
    net.heads = nn.Identity()
    return net


def base_transformer() -> nn.Module:
    """Return torchvision's ViT-B/16 for 224×224 images, without classifier: 86 million parameters."""
    net = torchvision.models.vit_b_16()
    net.heads = nn.Identity()
    return net


class Network(NamedTuple):
    """Backbone to measure, with its mini-batch size, mini-batches per epoch, and epochs of the tasks before."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    features: int
    batch: int
    steps: int
    epochs: int


NETWORKS = {
    "mlp": Network(lambda: MLP(784, hidden=(256,), features=256), (784,), 256, batch=64, steps=400, epochs=5),
    "wide": Network(lambda: MLP(784, hidden=(2000,), features=2000), (784,), 2000, batch=64, steps=100, epochs=3),
    "mlp3": Network(lambda: MLP(784, hidden=(256, 100), features=64), (784,), 64, batch=128, steps=400, epochs=5),
    "resnet18": Network(small_image_resnet18, (3, 32, 32), 512, batch=16, steps=12, epochs=2),
    "vit": Network(small_transformer, (3, 32, 32), 192, batch=16, steps=24, epochs=2),
    "vit_base": Network(base_transformer, (3, 224, 224), 768, batch=10, steps=2, epochs=1),
}


def digit_tasks(shape: tuple[int, ...], n: int, tasks: int = 2) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of ``tasks`` tasks: ``n`` images of digits; later tasks have permuted pixels.

    Each sample has the given ``shape``; labels of task ``t`` start at 10 · t. Images are enlarged and noisy, and one
    label in twenty is random, so that the loss stays above 0.
    """
    small, labels = task_data(SplitDigits(1).train_stream[0])
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(small), (n,), generator=generator)
    side = math.isqrt(shape[-1] ** len(shape[:2])) if len(shape) > 1 else math.isqrt(shape[0])
    large = nn.functional.interpolate(small[chosen], (side, side), mode="bilinear")
    x = (large + 0.1 * torch.randn(large.shape, generator=generator)).expand(n, math.prod(shape) // side**2, side, side)
    x = x.reshape(n, -1)
    second = torch.randperm(x.shape[1], generator=generator)
    y = torch.where(torch.rand(n, generator=generator) < 0.05, torch.arange(n) % N_CLASSES, labels[chosen])
    orders = [torch.arange(x.shape[1]), second]
    orders += [torch.randperm(x.shape[1], generator=generator) for _ in range(tasks - 2)]
    return (
        torch.cat([x[:, order] for order in orders[:tasks]]).view(tasks * n, *shape),
        torch.cat([y + N_CLASSES * task for task in range(tasks)]),
    )


def classifier_of(network: Network) -> nn.Module:
    """Return the network with a linear classifier, for the plain training that all costs are compared with."""
    return nn.Sequential(network.make(), nn.Linear(network.features, N_CLASSES))
