"""Streams over MNIST and Fashion-MNIST."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia.benchmarks.families import permuted, split
from avalanche_amnesia.contrib.streams.image_sets import CorruptDataError, data_root, missing, prepared
from avalanche_amnesia.contrib.streams.rotated import rotated


def SplitMNIST(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    class_order: Sequence[int] | None = None,
    root: str | Path | None = None,
    download: bool = False,
    standardise: bool = True,
) -> CLScenario:
    """The ten digits of MNIST in equal parts, one part per task; images float32 (1, 28, 28).

    Args:
        n_tasks: 1, 2, 5 or 10.
        seed: draws the subsets.
        n_train: images kept of the whole training set before the split into tasks, stratified, 10 to 60,000;
            None: all.
        n_test: the same of the test set, 10 to 10,000.
        class_order: the ten classes in the order in which the tasks take them; None: 0 to 9.
        root: the folder that holds ``MNIST/raw``; None: the environment variable AMNESIA_DATA.
        download: let torchvision fetch what is missing.
        standardise: subtract 0.1307 and divide by 0.3081; otherwise pixels are in [0, 1].

    Raises:
        DataNotFoundError: a file is missing; the message says which and what helps.
        CorruptDataError: a file is not the published one.
        ValueError: a value that is not allowed; the message names those that are.
    """
    images = prepared("MNIST", load_idx("MNIST", root, download), standardise)
    return split(images.subset(n_train, n_test, seed), n_tasks, class_order)


def SplitFashionMNIST(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    class_order: Sequence[int] | None = None,
    root: str | Path | None = None,
    download: bool = False,
    standardise: bool = True,
) -> CLScenario:
    """The ten classes of Fashion-MNIST in equal parts, one part per task; images float32 (1, 28, 28).

    Arguments and errors are those of :func:`SplitMNIST`, with the files in ``FashionMNIST/raw``, mean 0.2860 and
    standard deviation 0.3530.
    """
    images = prepared("FashionMNIST", load_idx("FashionMNIST", root, download), standardise)
    return split(images.subset(n_train, n_test, seed), n_tasks, class_order)


def PermutedMNIST(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    root: str | Path | None = None,
    download: bool = False,
    standardise: bool = True,
) -> CLScenario:
    """All of MNIST in every task; task 0 as it is, each later task with its pixels in a fixed new order.

    Args:
        n_tasks: at least 1; all tasks share one copy of the images.
        seed: draws the subsets and each task's order of pixels, which depends on the seed and the task only.
        n_train: images per task (the same ones in every task), stratified, 10 to 60,000; None: all.
        n_test: the same of the test set, 10 to 10,000.
        root, download, standardise: as of :func:`SplitMNIST`; errors too.
    """
    images = prepared("MNIST", load_idx("MNIST", root, download), standardise)
    return permuted(images.subset(n_train, n_test, seed), n_tasks, seed)


def RotatedMNIST(
    n_tasks: int = 5,
    *,
    angles: Sequence[float] | None = None,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    root: str | Path | None = None,
    download: bool = False,
    standardise: bool = True,
) -> CLScenario:
    """All of MNIST in every task, turned counter-clockwise by the task's angle (bilinear, black corners).

    Args:
        n_tasks: at least 1; all tasks share one copy of the images.
        angles: degrees, one per task; None: evenly spaced from 0 to 90, both included.
        seed: draws the subsets.
        n_train, n_test: as of :func:`PermutedMNIST`.
        root, download, standardise: as of :func:`SplitMNIST`; pixels are standardised after turning. Errors too.
    """
    images = prepared("MNIST", load_idx("MNIST", root, download), standardise)
    return rotated(images.subset(n_train, n_test, seed), n_tasks, angles)


def load_idx(name: str, root: str | Path | None, download: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test set of the MNIST family, from the files that torchvision keeps, which stay as they are."""
    from torchvision import datasets

    given = data_root(name, root, f"{name}/raw")
    family, raw = getattr(datasets, name), given / name / "raw"
    files = [(raw / gz.removesuffix(".gz"), raw / gz, md5) for gz, md5 in family.resources]
    absent = [extracted.name for extracted, packed, _ in files if not extracted.is_file() and not packed.is_file()]
    if absent and not download:
        raise missing(name, f"{', '.join(absent)} (or the same with .gz) of {name}/raw", raw)
    if absent:
        family(given, download=True)
    train_x, train_y, test_x, test_y = (_read(*file) for file in files)
    return (train_x.unsqueeze(1), train_y), (test_x.unsqueeze(1), test_y)


def _read(extracted: Path, packed: Path, md5: str) -> Tensor:
    from torchvision.datasets.mnist import read_image_file, read_label_file
    from torchvision.datasets.utils import check_integrity, extract_archive

    read = read_image_file if "images" in extracted.name else read_label_file
    with TemporaryDirectory() as folder:  # the root may be read-only, and torchvision reads no .gz in place
        path = extracted
        if not extracted.is_file():
            if not check_integrity(packed, md5):
                raise CorruptDataError(
                    f"{packed} does not have the published checksum (md5 {md5}); delete it and fetch it again"
                )
            path = extract_archive(packed, folder)
        try:
            tensor: Tensor = read(path)
        except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"{extracted} is no complete idx file of bytes; delete it and fetch it again"
            ) from error
    return tensor
