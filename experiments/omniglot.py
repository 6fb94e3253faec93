"""Stream over Omniglot: one alphabet per task."""

import io
import zipfile
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.families import Images, stratified_positions
from avalanche_amnesia.benchmarks.tasks import task_benchmark
from avalanche_amnesia.contrib.streams.image_sets import Standardise, data_root, missing_data

Alphabets = Literal["small", "background"]
SMALL = tuple(Path("omniglot-small") / f"images_background_small{number}.zip" for number in (1, 2))
BACKGROUND = Path("omniglot-py") / "images_background"


def SplitOmniglot(
    n_tasks: int | None = None,
    *,
    alphabets: Alphabets = "small",
    root: str | Path | None = None,
    download: bool = False,
) -> CLScenario:
    """Return a stream over Omniglot's handwritten characters, one alphabet per task; images float32 (1, 28, 28).

    Pixels are in [0, 1], ink is 1. Tasks are dissimilar and have few samples. Each character has 20 drawings: 14 for
    training and 6 for testing, always the same ones.

    Args:
        n_tasks: number of alphabets, in alphabetical order; None: all.
        alphabets: ``"small"``: the 8 alphabets (242 characters) of Omniglot's two small background sets, in
            ``omniglot-small/images_background_small1.zip`` and ``…2.zip``; ``"background"``: all 30 alphabets (964
            characters), in torchvision's folder ``omniglot-py``.
        root: folder that contains these; None: the environment variable AMNESIA_DATA.
        download: True to let torchvision download the 30 alphabets.

    Raises:
        DataNotFoundError: files are missing; the message names the files and a remedy.
        ValueError: invalid value; the message names the allowed values.
    """
    checks.one_of("alphabets", alphabets, Alphabets)
    given = data_root("Omniglot", root, "omniglot-small" if alphabets == "small" else "omniglot-py")
    if download and alphabets == "background" and not (given / BACKGROUND).is_dir():
        from torchvision.datasets import Omniglot

        Omniglot(str(given), background=True, download=True)
    return by_alphabet(omniglot(given, alphabets), n_tasks)


def by_alphabet(images: Images, n_tasks: int | None = None) -> CLScenario:
    """Return a benchmark with one alphabet per task, of the first ``n_tasks`` alphabets in ``images`` (None: all)."""
    classes = [list(alphabet) for _, alphabet in groupby(images.classes, lambda character: character // 100)]
    if n_tasks is not None and not 1 <= checks.whole_number("n_tasks", n_tasks) <= len(classes):
        raise ValueError(f"n_tasks={n_tasks}: there are {len(classes)} alphabets; give 1 to {len(classes)}")
    classes = classes[:n_tasks]
    return task_benchmark(images.train, images.test, classes, transforms=[images.wrap_transform(None)] * len(classes))


@cache
def omniglot(root: Path, alphabets: Alphabets = "small") -> Images:
    """Return training and test drawings; the class number is 100 · alphabet + character, in alphabetical order."""
    x, y = _drawings(root, alphabets)
    learned = torch.zeros(len(y), dtype=torch.bool)
    learned[stratified_positions(y, 14 * len(y) // 20, 0, "train")] = True  # the same for all seeds
    return Images((x[learned], y[learned]), (x[~learned], y[~learned]), before=(Standardise(0, 255),))


def _drawings(root: Path, alphabets: Alphabets) -> tuple[Tensor, Tensor]:
    from PIL import Image

    known: dict[str, dict[str, int]] = {}
    x, y = [], []
    for alphabet, character, content in _files(root, alphabets):
        characters = known.setdefault(alphabet, {})
        y.append(100 * list(known).index(alphabet) + characters.setdefault(character, len(characters)))
        drawing = Image.open(io.BytesIO(content)).convert("L").resize((28, 28), Image.Resampling.BOX)
        x.append(255 - torch.from_numpy(np.array(drawing)))
    return torch.stack(x)[:, None], torch.tensor(y)


def _files(root: Path, alphabets: Alphabets) -> Iterator[tuple[str, str, bytes]]:
    """Yield (alphabet, character, content of the image file) for every drawing, in alphabetical order."""
    if alphabets == "background":
        if not (root / BACKGROUND).is_dir():
            raise missing_data("Omniglot", f"{BACKGROUND}/", root)
        for file in sorted((root / BACKGROUND).glob("*/*/*.png")):
            yield file.parts[-3], file.parts[-2], file.read_bytes()
        return
    absent = [str(file) for file in SMALL if not (root / file).is_file()]
    if absent:
        raise missing_data("Omniglot", " and ".join(absent), root, downloads=False)
    drawings: dict[str, bytes] = {}  # both files contain two alphabets; duplicates would leak test images
    for packed in SMALL:
        with zipfile.ZipFile(root / packed) as archive:
            names = [name for name in archive.namelist() if name.endswith(".png")]
            drawings |= {name.split("/", 1)[1]: archive.read(name) for name in names}
    for name in sorted(drawings):
        alphabet, character, _ = name.split("/")
        yield alphabet, character, drawings[name]
