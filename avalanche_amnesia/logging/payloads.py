"""Conversion of metric values to the types that loggers write: numbers, texts, images, tables."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from avalanche.evaluation.metric_results import AlternativeValues, TensorImage
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.evaluation.picture import Picture

Payload = Any
"""A number, text, PIL image or table. (This package does not import PIL.)"""

SUPPORTED = (
    "numbers (Python, numpy, tensors of one), strings, PIL images, matplotlib figures, Avalanche's TensorImage, "
    "tables, AlternativeValues of these, and dicts of these"
)


def flatten_value(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) per part of a logged value: ``name/key`` for a dict, ``name/table`` for a picture's data."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten_value(f"{name}/{key}", inner)
    else:
        yield name, value
        if isinstance(value, Picture) and value.table is not None:
            yield f"{name}/table", value.table


def payload_of(value: Any) -> Payload:
    """Return a metric's value converted to a type that loggers write, or None if no such type fits."""
    if isinstance(value, AlternativeValues):
        converted = (payload_of(alternative) for alternative in value.alternatives)
        return next((v for v in converted if v is not None), None)
    if isinstance(value, str | Table):
        return value
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return float(value)
    if isinstance(value, Figure):
        value.savefig(buffer := io.BytesIO(), format="png")  # the figure stays open and unchanged
        buffer.seek(0)
        return to_pil_image((imread(buffer) * 255).round().astype(np.uint8))  # a PNG is read as shares of 255
    if isinstance(value, TensorImage):
        return _image_of(value.image)
    if isinstance(value, Tensor) and not value.is_complex():
        value = value.detach().cpu().double().numpy()  # numpy knows no bfloat16 and no float8
    if isinstance(value, np.ndarray) and value.shape in ((), (1,)) and value.dtype.kind in "biuf":
        return float(value.reshape(()))  # (1,) is the shape of Avalanche's losses
    return value if is_image(value) else None


def is_image(value: object) -> bool:
    """Return True for a PIL image."""
    return hasattr(value, "getbands") and hasattr(value, "save")


def _image_of(pixels: Tensor) -> Any:
    """Convert pixels, uint8 or in [0, 1], CxHxW (1 or 3 channels) or HxW, to a PIL image; None for other tensors."""
    pixels = pixels.detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.double() * 255).round()
        pixels = pixels.to(torch.uint8) if pixels.numel() and 0 <= pixels.min() <= pixels.max() <= 255 else pixels
    is_image = pixels.dim() == 2 or (pixels.dim() == 3 and pixels.shape[0] in (1, 3))
    return to_pil_image(pixels) if is_image and pixels.dtype == torch.uint8 else None
