"""Streams over MNIST and Fashion-MNIST."""

from collections.abc import Sequence
from pathlib import Path

from avalanche.benchmarks import CLScenario

from avalanche_amnesia.benchmarks.families import Images, permuted, split
from avalanche_amnesia.contrib.streams.idx import load_idx
from avalanche_amnesia.contrib.streams.rotated import rotated
from avalanche_amnesia.contrib.streams.transforms import Scale, Standardise

_STANDARD = {"MNIST": Standardise(0.1307, 0.3081), "FashionMNIST": Standardise(0.2860, 0.3530)}


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
    images = _load("MNIST", root, download, standardise).subset(n_train, n_test, seed)
    return split(images, n_tasks, class_order)


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
    images = _load("FashionMNIST", root, download, standardise).subset(n_train, n_test, seed)
    return split(images, n_tasks, class_order)


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
    images = _load("MNIST", root, download, standardise).subset(n_train, n_test, seed)
    return permuted(images, n_tasks, seed)


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
    images = _load("MNIST", root, download, standardise).subset(n_train, n_test, seed)
    return rotated(images, n_tasks, angles)


def _load(name: str, root: str | Path | None, download: bool, standardise: bool) -> Images:
    after = (_STANDARD[name],) if standardise else ()
    return Images(*load_idx(name, root, download), before=(Scale(255),), after=after)
