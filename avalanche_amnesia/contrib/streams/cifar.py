"""Streams over CIFAR-10 and CIFAR-100."""

import io
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia.benchmarks.families import split
from avalanche_amnesia.contrib.streams.image_sets import CorruptDataError, data_root, missing, prepared

JPEG = Path("cifar10-jpeg") / "cifar10_jpeg.npz"
"""Below a data root: CIFAR-10 with each image as JPEG of quality 75, see :func:`SplitCIFAR10`."""


def SplitCIFAR10(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    class_order: Sequence[int] | None = None,
    root: str | Path | None = None,
    download: bool = False,
    standardise: bool = True,
    jpeg: bool = False,
) -> CLScenario:
    """The ten classes of CIFAR-10 in equal parts, one part per task; images float32 (3, 32, 32).

    Args:
        n_tasks: 1, 2, 5 or 10.
        seed: draws the subsets.
        n_train: images kept of the whole training set before the split into tasks, stratified, 10 to 50,000;
            None: all.
        n_test: the same of the test set, 10 to 10,000.
        class_order: the ten classes in the order in which the tasks take them; None: 0 to 9.
        root: the folder that holds ``cifar-10-batches-py``; None: the environment variable AMNESIA_DATA.
        download: let torchvision fetch what is missing.
        standardise: subtract 0.473 and divide by 0.251; otherwise pixels are in [0, 1].
        jpeg: read ``cifar10-jpeg/cifar10_jpeg.npz`` instead: the same images from JPEG of quality 75, whose numbers
            are not to be compared with published ones.

    Raises:
        DataNotFoundError: files are missing; the message says which and what helps.
        CorruptDataError: a file is not the published one.
        ValueError: a value that is not allowed; the message names those that are.
    """
    images = cifar10_jpeg(data_root("CIFAR10", root, str(JPEG))) if jpeg else cifar("CIFAR10", root, download)
    return split(prepared("CIFAR10", images, standardise).subset(n_train, n_test, seed), n_tasks, class_order)


def SplitCIFAR100(
    n_tasks: int = 20,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    class_order: Sequence[int] | None = None,
    root: str | Path | None = None,
    download: bool = False,
    standardise: bool = True,
) -> CLScenario:
    """The hundred classes of CIFAR-100 in equal parts, one part per task; images float32 (3, 32, 32).

    Args:
        n_tasks: 1, 2, 4, 5, 10, 20, 25, 50 or 100.
        n_train, n_test: as of :func:`SplitCIFAR10`, at least 100.
        root: the folder that holds ``cifar-100-python``; None: the environment variable AMNESIA_DATA.
        standardise: subtract 0.478 and divide by 0.268; otherwise pixels are in [0, 1].
        seed, class_order, download: as of :func:`SplitCIFAR10`; errors too.
    """
    images = prepared("CIFAR100", cifar("CIFAR100", root, download), standardise)
    return split(images.subset(n_train, n_test, seed), n_tasks, class_order)


@cache
def cifar10_jpeg(root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """CIFAR-10 from JPEG of quality 75: ``(x, y)`` for training and test, x uint8 (n, 3, 32, 32)."""
    if not (root / JPEG).is_file():
        raise missing("CIFAR10", str(JPEG), root, downloads=False)
    return _unpacked(root / JPEG, "train"), _unpacked(root / JPEG, "test")


def _unpacked(file: Path, part: str) -> tuple[Tensor, Tensor]:
    from PIL import Image

    with np.load(file, allow_pickle=False) as arrays:
        data, ends = arrays[f"{part}_jpeg"].tobytes(), arrays[f"{part}_offsets"]
        labels = torch.from_numpy(arrays[f"{part}_labels"]).long()
    images = np.stack([np.array(Image.open(io.BytesIO(data[a:b]))) for a, b in pairwise(ends)])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels


def cifar(name: str, root: str | Path | None, download: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test set by torchvision, x uint8 (n, 3, 32, 32)."""
    from torchvision import datasets

    family = getattr(datasets, name)
    given = data_root(name, root, family.base_folder)
    files = [given / family.base_folder / file for file, _ in (*family.train_list, *family.test_list)]
    absent = [file.name for file in files if not file.is_file()]
    if absent and not download:
        copied = name == "CIFAR10" and (given / JPEG).is_file()
        lossy = f"jpeg=True reads {JPEG}, which is there: a lossy copy, not for comparison with papers"
        raise missing(name, f"{', '.join(absent)} of {family.base_folder}", given, instead=lossy if copied else "")
    parts = []
    for train in (True, False):
        try:
            part = family(given, train=train, download=bool(absent))
        except RuntimeError as error:  # a checksum that differs
            raise CorruptDataError(
                f"{given / family.base_folder} is not what was published ({error}); delete it and fetch it again"
            ) from error
        parts.append((torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)))
    return parts[0], parts[1]
