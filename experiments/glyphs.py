"""Glyphs: images of 60 printed characters, 32 × 32 pixels, for 12 tasks of five classes; fonts from two packages.

    pip install --no-deps trdg==1.8.0 multicolorcaptcha==1.2.0      # 100 and 48 fonts; no code of them is imported

The tasks share structure (strokes, serifs). No font family of the test images occurs in the training images.
"""

import string
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from avalanche_amnesia.benchmarks.families import Images
from avalanche_amnesia.contrib.streams.image_sets import Standardise
from avalanche_amnesia.seeding import derive_seed

CHARACTERS = string.digits + string.ascii_uppercase.replace("I", "") + string.ascii_lowercase.replace("l", "")
"""Without capital I and small l, which look the same in many fonts."""
PACKAGES = ("trdg", "multicolorcaptcha")
N_TEST_FONTS, N_VALIDATION_FONTS = 45, 25
"""Smallest numbers of fonts; a family is never split, so there may be a few more."""
SIZE, VARIANTS = 48, 4
"""Font size in pixels, before images are scaled down by half; images per character and font."""


class GlyphNet(nn.Module):
    """Network of two 5 × 5 convolutions with stride 2 and one linear layer, for images of 32 × 32 pixels.

    Args:
        scale: factor of the width of every layer, above 0.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        one, two, self.features = (max(1, round(scale * width)) for width in (24, 48, 128))
        self.first, self.second = (nn.Conv2d(a, b, 5, 2, 2) for a, b in ((1, one), (one, two)))
        self.linear = nn.Linear(two * 8 * 8, self.features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(self.linear(x.flatten(1)))


@cache
def glyphs(root: Path) -> Images:
    """Return training and test images, ordered by font family; ``root`` is not used."""
    test, train = _parted(families(), N_TEST_FONTS)
    return Images(_images(train), _images(test), before=(Standardise(0, 255),))


@cache
def held_out_fonts(root: Path) -> Images:
    """Return the training images only, with some font families held out as test images; ``root`` is not used."""
    validation, train = _parted(_parted(families(), N_TEST_FONTS)[1], N_VALIDATION_FONTS)
    return Images(_images(train), _images(validation), before=(Standardise(0, 255),))


def families() -> list[list[Path]]:
    """Return the files of all fonts that contain all characters: a list per font family, in a fixed random order."""
    found: dict[str, list[Path]] = {}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"the fonts of {package} are missing: pip install --no-deps {' '.join(PACKAGES)}")
        for path in sorted(Path(spec.submodule_search_locations[0], "fonts").rglob("*.[to]tf")):
            font = ImageFont.truetype(path, SIZE)
            missing = bytes(font.getmask("\uffff"))
            if path.parent.name not in ("cn", "ja") and all(
                bytes(font.getmask(each)) not in (missing, b"") for each in CHARACTERS
            ):
                found.setdefault(str(font.getname()[0]).split()[0].lower(), []).append(path)
    names = sorted(found)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(derive_seed(0, "fonts")))
    return [found[names[position]] for position in order.tolist()]


def _parted(families: list[list[Path]], at_least: int) -> tuple[list[list[Path]], list[list[Path]]]:
    """Split ``families`` in two: the first families with together ``at_least`` fonts, and the rest."""
    n = next(n for n in range(len(families)) if sum(map(len, families[:n])) >= at_least)
    return families[:n], families[n:]


def _images(families: list[list[Path]]) -> tuple[Tensor, Tensor]:
    drawn = [_of_font(path) for family in families for path in family]
    return torch.cat(drawn)[:, None], torch.arange(len(CHARACTERS)).repeat_interleave(VARIANTS).repeat(len(drawn))


@cache
def _of_font(path: Path) -> Tensor:
    """Return images of all characters of a font, randomly rotated, sheared, scaled and shifted, uint8."""
    font = ImageFont.truetype(path, SIZE)
    generator = torch.Generator().manual_seed(derive_seed(0, "glyphs", path.name))
    drawn = []
    for character in CHARACTERS:
        image = Image.new("L", (64, 64))
        ImageDraw.Draw(image).text((32, 32), character, fill=255, font=font, anchor="mm")
        for _ in range(VARIANTS):
            turn, shear, size, right, down = (2 * torch.rand(5, generator=generator, dtype=torch.double) - 1).tolist()
            cos, sin = np.cos(0.4 * turn) / (1 + 0.3 * size), np.sin(0.4 * turn) / (1 + 0.3 * size)
            a, b, c, d = cos, sin + 0.3 * shear, -sin, cos
            across, up = 32 + 8 * right, 32 + 8 * down  # new centre of the character
            matrix = (a, b, 32 - a * across - b * up, c, d, 32 - c * across - d * up)
            changed = image.transform((64, 64), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
            drawn.append(np.asarray(changed.resize((32, 32), Image.Resampling.BOX)))
    return torch.from_numpy(np.stack(drawn))
