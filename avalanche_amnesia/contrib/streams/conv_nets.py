"""Convolutional feature extractors for small images, used to compare the methods."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class SmallConvNet(nn.Module):
    """Network of three 3 × 3 convolutions, each with BatchNorm, ReLU and max pooling, and one linear layer with ReLU.

    Inputs ``(batch, 3, 32, 32)``, features ``(batch, 128)`` at scale 1.

    Args:
        scale: times the width of every layer, above 0.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        widths = (3, *_scale_widths(scale, 32, 64, 128))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.pool = nn.MaxPool2d(2)
        (self.features,) = _scale_widths(scale, 128)
        self.linear = nn.Linear(widths[-1] * 4 * 4, self.features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images of 32 × 32 pixels."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.pool(torch.relu(norm(convolution(x))))
        return torch.relu(self.linear(x.flatten(1)))


class CharacterNet(nn.Module):
    """Network of two 5 × 5 convolutions with max pooling and one linear layer, for images of 28 × 28 pixels.

    Inputs ``(batch, 1, 28, 28)``, features ``(batch, 128)`` at scale 1.

    Args:
        scale: times the width of every layer, above 0.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        one, two, self.features = _scale_widths(scale, 24, 48, 128)
        self.first, self.second = nn.Conv2d(1, one, 5, padding=2), nn.Conv2d(one, two, 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Linear(two * 7 * 7, self.features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images of 28 × 28 pixels."""
        x = self.pool(torch.relu(self.first(x)))
        return torch.relu(self.linear(self.pool(torch.relu(self.second(x))).flatten(1)))


def _scale_widths(scale: float, *widths: int) -> list[int]:
    return [max(1, round(scale * width)) for width in widths]


def cifar_resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 adapted to images of 32 × 32 pixels; features ``(batch, 512)``.

    The first convolution is 3 × 3 without stride, and the max pooling is removed.
    """
    from torchvision.models import resnet18

    net: nn.Module = resnet18()
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    net.features = 512  # type: ignore[assignment]
    return net
