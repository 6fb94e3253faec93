"""Sets of images below a data root: where they lie, what may be wrong with them, how their pixels are prepared."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from avalanche_amnesia.benchmarks.families import Images

ENVIRONMENT = "AMNESIA_DATA"


class DataNotFoundError(FileNotFoundError):
    """The files of a data set aren't under the data root."""


class CorruptDataError(OSError):
    """A file of a data set is not what was published."""


def data_root(name: str, root: str | Path | None, holds: str) -> Path:
    """The data root that is given, or that the environment names."""
    given = root if root is not None else os.environ.get(ENVIRONMENT)
    if not given:
        raise DataNotFoundError(
            f"{name} needs a data root: give root=, a folder that holds {holds}, or set the environment "
            f"variable {ENVIRONMENT}; with download=True torchvision fills that folder"
        )
    return Path(given)


def missing(name: str, what: str, root: Path, downloads: bool = True, instead: str = "") -> DataNotFoundError:
    """The error for files that are not there."""
    way_out = (", or give download=True" if downloads else "") + (f"; {instead}" if instead else "")
    return DataNotFoundError(
        f"{name}: {what} missing in {root}; put it there, point root= or the environment variable {ENVIRONMENT} to a "
        f"folder that holds it{way_out}"
    )


@dataclass(frozen=True)
class Scale:
    """Divide a batch by a constant, e.g. 255 for bytes to [0, 1]."""

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


_STANDARD = {
    "MNIST": Standardise(0.1307, 0.3081),
    "FashionMNIST": Standardise(0.2860, 0.3530),
    "CIFAR10": Standardise(0.473, 0.251),
    "CIFAR100": Standardise(0.478, 0.268),
}


def prepared(name: str, parts: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], standardise: bool) -> Images:
    """Training and test set of bytes, whose pixels tasks get in [0, 1], or standardised."""
    return Images(*parts, before=(Scale(255),), after=(_STANDARD[name],) if standardise else ())
