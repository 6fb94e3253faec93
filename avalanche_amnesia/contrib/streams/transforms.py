"""Deterministic transforms of whole batches of images, float32 ``(n, channels, height, width)``."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import interpolate


@dataclass(frozen=True)
class Scale:
    """Divide by a constant, e.g. 255 for bytes to [0, 1]."""

    by: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.div(self.by)


@dataclass(frozen=True)
class Standardise:
    """Subtract a mean and divide by a standard deviation, the same for all pixels."""

    mean: float
    std: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.sub(self.mean).div(self.std)


@dataclass(frozen=True)
class Rotate:
    """Rotate counter-clockwise about the centre, bilinear, with zeros from outside the image."""

    degrees: float

    def __call__(self, x: Tensor) -> Tensor:
        from torchvision.transforms.functional import InterpolationMode, rotate

        return rotate(x, self.degrees, interpolation=InterpolationMode.BILINEAR)


@dataclass(frozen=True)
class Fit:
    """Images of one size and number of colours: bilinear with antialiasing; grey is repeated, colours are averaged."""

    size: int | None
    channels: int | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.channels == 1 < x.shape[1]:
            x = x.mean(1, keepdim=True)
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True)
        if self.channels is not None and x.shape[1] < self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        return x
