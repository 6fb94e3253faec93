"""Streams over image data sets: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from a data root; rotated digits."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict, Unpack

import numpy as np
import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.digits import digits
from avalanche_amnesia.benchmarks.families import Images, all_classes, permuted, split

ENVIRONMENT = "AMNESIA_DATA"
JPEG = Path("cifar10-jpeg") / "cifar10_jpeg.npz"
"""File under the data root: CIFAR-10 with each image as JPEG of quality 75, see :func:`SplitCIFAR10`."""
Parts = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Images and labels: the training set, then the test set."""


class DataNotFoundError(FileNotFoundError):
    """Error raised if files of a data set are missing under the data root."""


class CorruptDataError(OSError):
    """Error raised if a file of a data set differs from the published file."""


def data_root(name: str, root: str | Path | None, contains: str) -> Path:
    """Return ``root``, or else the folder in the variable AMNESIA_DATA; DataNotFoundError if neither is given."""
    given = root if root is not None else os.environ.get(ENVIRONMENT)
    if not given:
        raise DataNotFoundError(
            f"{name} needs a data root: give root=, a folder that holds {contains}, or set the environment "
            f"variable {ENVIRONMENT}; with download=True torchvision fills that folder"
        )
    return Path(given)


def missing_data(name: str, what: str, root: Path, downloads: bool = True) -> DataNotFoundError:
    """Return the DataNotFoundError to raise for missing files of the data set ``name``."""
    return DataNotFoundError(
        f"{name}: {what} missing in {root}; put it there, point root= or the environment variable {ENVIRONMENT} to a "
        f"folder that holds it{', or give download=True' if downloads else ''}"
    )


@dataclass(frozen=True)
class Standardise:
    """Transform that subtracts ``mean`` and divides by ``std``, the same for all pixels."""

    mean: float
    std: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.sub(float(self.mean)).div_(self.std)


_STANDARD = {
    "MNIST": Standardise(0.1307, 0.3081),
    "FashionMNIST": Standardise(0.2860, 0.3530),
    "CIFAR10": Standardise(0.473, 0.251),
    "CIFAR100": Standardise(0.478, 0.268),
}


@dataclass(frozen=True)
class Rotate:
    """Transform that rotates images counter-clockwise about the centre (bilinear, filled with zeros)."""

    degrees: float

    def __call__(self, x: Tensor) -> Tensor:
        from torchvision.transforms.functional import InterpolationMode, rotate

        return rotate(x, self.degrees, interpolation=InterpolationMode.BILINEAR)


def rotated(images: Images, n_tasks: int, angles: Sequence[float] | None) -> CLScenario:
    """Return a stream with all classes in every task, and each task's images rotated by its own angle."""
    n_tasks = checks.whole_number("n_tasks", n_tasks)
    turns = [90.0 * task / max(1, n_tasks - 1) for task in range(n_tasks)] if angles is None else list(angles)
    if len(turns) != n_tasks:
        raise ValueError(f"{len(turns)} angles for {n_tasks} tasks; give one angle in degrees per task")
    return all_classes(images, [Rotate(float(turn)) if turn % 360 else None for turn in turns])


class ImageOptions(TypedDict, total=False):
    """Options of all streams over image data sets.

    Attributes:
        seed: seed of the subsets; 0 by default.
        n_train: number of training images, stratified, at least one per class. ``Split…`` streams divide them into
            tasks; in other streams every task has all of them. None, the default: all.
        n_test: number of test images in the same way.
        root: the folder of data sets, with ``MNIST/raw``, ``FashionMNIST/raw``, ``cifar-10-batches-py`` or
            ``cifar-100-python``; None, the default: the environment variable AMNESIA_DATA.
        download: let torchvision download missing files; False by default.
    """

    seed: int
    n_train: int | None
    n_test: int | None
    root: str | Path | None
    download: bool


def images_of(
    name: str,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    root: str | Path | None = None,
    download: bool = False,
    jpeg: bool = False,
) -> Images:
    """Return stratified subsets of images as bytes; tasks read them scaled to [0, 1] and standardised."""
    parts = cifar10_jpeg(data_root(name, root, str(JPEG))) if jpeg else load(name, root, download)
    return Images(*parts, before=(Standardise(0, 255),), after=(_STANDARD[name],)).subset(n_train, n_test, seed)


def SplitMNIST(
    n_tasks: int = 5, *, class_order: Sequence[int] | None = None, **options: Unpack[ImageOptions]
) -> CLScenario:
    """Return a stream over MNIST with the ten digits split equally among the tasks; images float32 (1, 28, 28).

    Pixels are divided by 255, minus 0.1307 and divided by 0.3081.

    Args:
        n_tasks: 1, 2, 5 or 10.
        class_order: the ten classes in the order of their tasks; None: 0 to 9.
        options: see :class:`ImageOptions`.

    Raises:
        DataNotFoundError: a file is missing; the message says which one and how to get it.
        CorruptDataError: a file differs from the published one.
        ValueError: for an invalid value; the message lists the valid ones.
    """
    return split(images_of("MNIST", **options), n_tasks, class_order)


def SplitFashionMNIST(
    n_tasks: int = 5, *, class_order: Sequence[int] | None = None, **options: Unpack[ImageOptions]
) -> CLScenario:
    """Return a stream over Fashion-MNIST with its ten classes split equally among the tasks; float32 (1, 28, 28).

    Arguments and errors are those of :func:`SplitMNIST`, with mean 0.2860 and standard deviation 0.3530.
    """
    return split(images_of("FashionMNIST", **options), n_tasks, class_order)


def PermutedMNIST(n_tasks: int = 5, **options: Unpack[ImageOptions]) -> CLScenario:
    """Return a stream with all of MNIST in every task: unchanged in task 0, then each task with its own pixel order.

    Args:
        n_tasks: at least 1; all tasks share one copy of the images.
        options: see :class:`ImageOptions`; a task's pixel order depends on the seed and the task only. Errors are
            those of :func:`SplitMNIST`.
    """
    return permuted(images_of("MNIST", **options), n_tasks, options.get("seed", 0))


def RotatedMNIST(
    n_tasks: int = 5, *, angles: Sequence[float] | None = None, **options: Unpack[ImageOptions]
) -> CLScenario:
    """Return a stream with all of MNIST in every task, rotated counter-clockwise by the task's angle.

    Args:
        n_tasks: at least 1; all tasks share one copy of the images.
        angles: degrees, one per task; None: evenly spaced from 0 to 90, both included.
        options: see :class:`ImageOptions`; errors are those of :func:`SplitMNIST`. Images are rotated (bilinear) before
            they are standardised.
    """
    return rotated(images_of("MNIST", **options), n_tasks, angles)


def RotatedDigits(
    n_tasks: int = 5,
    *,
    angles: Sequence[float] | None = None,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
) -> CLScenario:
    """Return a stream with all of scikit-learn's digits in every task, rotated by the task's angle.

    Args:
        n_tasks: at least 1.
        angles: degrees, one per task; None: evenly spaced from 0 to 90, both included.
        seed: seed of the train/test split and of the subsets.
        n_train: training images per task (the same ones in every task), stratified, 10 to 1,437; None: all.
        n_test: test images per task, stratified, 10 to 360; None: all.

    Raises:
        ValueError: for an invalid value; the message lists the valid ones.
    """
    return rotated(digits(seed).subset(n_train, n_test, seed), n_tasks, angles)


def SplitCIFAR10(
    n_tasks: int = 5,
    *,
    class_order: Sequence[int] | None = None,
    jpeg: bool = False,
    **options: Unpack[ImageOptions],
) -> CLScenario:
    """Return a stream over CIFAR-10 with its ten classes split equally among the tasks; images float32 (3, 32, 32).

    Pixels are divided by 255, minus 0.473 and divided by 0.251.

    Args:
        n_tasks: 1, 2, 5 or 10.
        jpeg: read ``cifar10-jpeg/cifar10_jpeg.npz`` below the data root instead: the same images as JPEG of quality 75.
            Do not compare the results with published ones.
        class_order, options: see :func:`SplitMNIST`, also for the errors.
    """
    return split(images_of("CIFAR10", jpeg=jpeg, **options), n_tasks, class_order)


def SplitCIFAR100(
    n_tasks: int = 20, *, class_order: Sequence[int] | None = None, **options: Unpack[ImageOptions]
) -> CLScenario:
    """Return a stream over CIFAR-100 with its 100 classes split equally among the tasks; images float32 (3, 32, 32).

    Pixels are divided by 255, minus 0.478 and divided by 0.268.

    Args:
        n_tasks: 1, 2, 4, 5, 10, 20, 25, 50 or 100.
        class_order, options: see :func:`SplitMNIST`, also for the errors.
    """
    return split(images_of("CIFAR100", **options), n_tasks, class_order)


def files_of(name: str) -> list[Path]:
    """Return the paths below a data root where torchvision stores a data set (idx files without the ending ``.gz``)."""
    from torchvision import datasets

    if name == "CIFAR10-JPEG":
        return [JPEG]
    family = getattr(datasets, name)
    if name.endswith("MNIST"):
        return [Path(name, "raw", gz).with_suffix("") for gz, _ in family.resources]
    return [Path(family.base_folder, file) for file, _ in (*family.train_list, *family.test_list)]


def absent_files(name: str, root: Path) -> list[Path]:
    """Return the files of a data set that are missing below a data root; idx files may end with ``.gz``."""
    ends = ("", ".gz") if name.endswith("MNIST") else ("",)
    return [file for file in files_of(name) if not any((root / f"{file}{end}").is_file() for end in ends)]


def load(name: str, root: str | Path | None, download: bool) -> Parts:
    """Return ((x, y) for training, (x, y) for test) of a torchvision data set, x uint8 (n, channels, height, width).

    Files of MNIST and Fashion-MNIST may also end with ``.gz``; they are not changed.
    """
    from torchvision import datasets

    family, folder = getattr(datasets, name), files_of(name)[0].parent
    given = data_root(name, root, str(folder))
    absent = absent_files(name, given)
    if absent and not download:
        also = " (or the same with .gz)" if name.endswith("MNIST") else ""
        raise missing_data(name, f"{', '.join(file.name for file in absent)}{also} of {folder}", given / folder)
    try:
        if absent:
            family(given, download=True)
        if name.endswith("MNIST"):
            train_x, train_y, test_x, test_y = (_read(given / name / "raw" / gz, md5) for gz, md5 in family.resources)
            return (train_x.unsqueeze(1), train_y), (test_x.unsqueeze(1), test_y)
        train, test = (family(given, train=train) for train in (True, False))
    except RuntimeError as error:  # wrong checksum
        raise CorruptDataError(
            f"{name} in {given} is not what was published ({error}); delete its folder and fetch it again"
        ) from error
    images = (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test))
    return (next(images), torch.tensor(train.targets)), (next(images), torch.tensor(test.targets))


def _read(packed: Path, md5: str) -> Tensor:
    from torchvision.datasets.mnist import read_image_file, read_label_file
    from torchvision.datasets.utils import check_integrity, extract_archive

    extracted = packed.with_suffix("")
    held = extracted if extracted.is_file() else packed
    try:
        with TemporaryDirectory() as folder:  # for the content of .gz files, as the root may be read-only
            if held == packed and not check_integrity(packed, md5):
                raise ValueError(f"its md5 is not {md5}")
            path = extracted if held == extracted else extract_archive(packed, folder)
            tensor: Tensor = (read_image_file if "images" in packed.name else read_label_file)(path)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{held} is not what was published ({error}); delete it and fetch it again") from error
    return tensor


@cache
def cifar10_jpeg(root: Path) -> Parts:
    """Return CIFAR-10 from JPEG files (quality 75): ``(x, y)`` for training and test, x uint8 (n, 3, 32, 32)."""
    if not (root / JPEG).is_file():
        raise missing_data("CIFAR10", str(JPEG), root, downloads=False)
    return _decode_jpegs(root / JPEG, "train"), _decode_jpegs(root / JPEG, "test")


def _decode_jpegs(file: Path, part: str) -> tuple[Tensor, Tensor]:
    from PIL import Image

    with np.load(file, allow_pickle=False) as arrays:
        data, ends = arrays[f"{part}_jpeg"].tobytes(), arrays[f"{part}_offsets"]
        labels = torch.from_numpy(arrays[f"{part}_labels"]).long()
    images = np.stack([np.array(Image.open(io.BytesIO(data[a:b]))) for a, b in pairwise(ends)])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels
