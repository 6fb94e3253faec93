"""Data sets of the streams: their contents, their files, and how to download them."""

from dataclasses import dataclass
from pathlib import Path

from avalanche_amnesia.contrib.streams.image_sets import JPEG


@dataclass(frozen=True)
class DataSet:
    """A data set below a data root; ``files`` are patterns, and each must match at least one file."""

    name: str
    content: str
    files: tuple[str, ...]
    streams: str
    downloads: bool = True

    def is_there(self, root: Path | None) -> bool:
        """Return True if all files exist below a data root; their content is not checked."""
        return not self.files or (root is not None and all(any(root.glob(pattern)) for pattern in self.files))

    def download(self, root: Path) -> None:
        """Download missing files with torchvision."""
        if not self.downloads:
            raise ValueError(f"{self.name} can't be downloaded by torchvision: put {', '.join(self.files)} into {root}")
        from torchvision import datasets

        root.mkdir(parents=True, exist_ok=True)
        getattr(datasets, self.name)(str(root), download=True)


def _idx(name: str) -> tuple[str, ...]:
    kinds = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(f"{name}/raw/{kind}-ubyte*" for kind in kinds)


_BATCHES = tuple(f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"))
_SETS = (
    DataSet("digits", "1,797 digits of 8 × 8, inside scikit-learn", (), "Split-, Permuted-, RotatedDigits", False),
    DataSet("MNIST", "70,000 digits of 28 × 28", _idx("MNIST"), "Split-, Permuted-, RotatedMNIST"),
    DataSet("FashionMNIST", "70,000 clothes, 28 × 28", _idx("FashionMNIST"), "SplitFashionMNIST"),
    DataSet("CIFAR10", "60,000 colour images of 32 × 32, 10 classes", _BATCHES, "SplitCIFAR10"),
    DataSet("CIFAR10-JPEG", "the same from JPEG of quality 75", (str(JPEG),), "jpeg: true", False),
    DataSet(
        "CIFAR100",
        "60,000 colour images of 32 × 32, 100 classes",
        ("cifar-100-python/train", "cifar-100-python/test"),
        "SplitCIFAR100",
    ),
)
DATA_SETS = {data.name: data for data in _SETS}
