"""MNIST-like files in the layout that torchvision expects, read in place."""

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ENVIRONMENT = "AMNESIA_DATA"
_UNSIGNED_BYTE = 8


class DataNotFoundError(FileNotFoundError):
    """The files of a data set aren't under the data root."""


class CorruptDataError(OSError):
    """A file of a data set is not what was published."""


def load_idx(name: str, root: str | Path | None, download: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test set of a torchvision data set of the MNIST family.

    Args:
        name: the torchvision class, ``"MNIST"`` or ``"FashionMNIST"``; its files lie in ``root/name/raw``,
            either extracted or as the published ``.gz``. They are only read.
        root: the data root; None: the environment variable AMNESIA_DATA.
        download: let torchvision download and extract what is missing.

    Returns:
        ``(x, y)`` for training and test: x uint8 (n, 1, 28, 28), y int64 (n,).

    Raises:
        DataNotFoundError: no root, or a file is missing and ``download`` is False.
        CorruptDataError: a file is not the published one.
    """
    from torchvision import datasets

    family = getattr(datasets, name)
    where = _root(root, name)
    raw = where / name / "raw"
    missing = [gz for gz, _ in family.resources if not (raw / _stem(gz)).is_file() and not (raw / gz).is_file()]
    if missing and not download:
        raise DataNotFoundError(
            f"{name}: {', '.join(_stem(gz) for gz in missing)} (or the same with .gz) missing in {raw}; "
            f"put the files there, point root= or the environment variable {ENVIRONMENT} to a folder that "
            f"holds {name}/raw, or give download=True"
        )
    if missing:
        family(where, download=True)
    train_x, train_y, test_x, test_y = (_read(raw, gz, md5) for gz, md5 in family.resources)
    return (train_x.unsqueeze(1), train_y.to(torch.int64)), (test_x.unsqueeze(1), test_y.to(torch.int64))


def _root(root: str | Path | None, name: str) -> Path:
    given = root if root is not None else os.environ.get(ENVIRONMENT)
    if not given:
        raise DataNotFoundError(
            f"{name} needs a data root: give root=, a folder that holds {name}/raw, or set the environment "
            f"variable {ENVIRONMENT}; with download=True torchvision fills that folder"
        )
    return Path(given)


def _read(raw: Path, gz: str, md5: str) -> Tensor:
    extracted = raw / _stem(gz)
    if extracted.is_file():
        return _parse(extracted.read_bytes(), extracted)
    packed = (raw / gz).read_bytes()
    if hashlib.md5(packed, usedforsecurity=False).hexdigest() != md5:
        raise CorruptDataError(
            f"{raw / gz} does not have the published checksum (md5 {md5}); delete it and fetch it again"
        )
    return _parse(gzip.decompress(packed), raw / gz)


def _parse(content: bytes, path: Path) -> Tensor:
    kind, n_dims = (content[2], content[3]) if len(content) >= 4 else (0, 0)
    start = 4 + 4 * n_dims
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist() if len(content) >= start else []
    if kind != _UNSIGNED_BYTE or len(shape) != n_dims or len(content) != start + int(np.prod(shape)):
        raise CorruptDataError(f"{path} is no complete idx file of bytes; delete it and fetch it again")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).reshape(shape)


def _stem(gz: str) -> str:
    return gz.removesuffix(".gz")
