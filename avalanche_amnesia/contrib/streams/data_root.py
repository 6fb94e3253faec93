"""The folder below which data sets lie, and what may be wrong with it."""

import os
from pathlib import Path

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
