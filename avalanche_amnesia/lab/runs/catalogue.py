"""Data sets that the streams read: what they are, where their files lie, and whether they are there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from avalanche_amnesia.contrib.streams.cifar import JPEG
from avalanche_amnesia.contrib.streams.omniglot import BACKGROUND, SMALL


@dataclass(frozen=True)
class DataSet:
    """A data set below a data root."""

    name: str
    content: str
    place: str
    streams: tuple[str, ...]
    files: Callable[[], Sequence[Sequence[Path]]]
    downloads: bool = True

    def is_there(self, root: Path) -> bool:
        """Tell whether all files lie below a data root; their content is not looked at."""
        return all(any((root / file).exists() for file in either) for either in self.files())

    def download(self, root: Path) -> None:
        """Let torchvision fetch what is missing."""
        if not self.downloads:
            raise ValueError(f"{self.name} can't be downloaded by torchvision: put it into {root / self.place}")
        from torchvision import datasets

        root.mkdir(parents=True, exist_ok=True)
        getattr(datasets, self.name)(str(root), download=True)


def _idx(name: str) -> Callable[[], Sequence[Sequence[Path]]]:
    def files() -> Sequence[Sequence[Path]]:
        from torchvision import datasets

        raw = Path(name) / "raw"
        resources = [gz for gz, _ in getattr(datasets, name).resources]
        return [(raw / gz.removesuffix(".gz"), raw / gz) for gz in resources]

    return files


def _cifar(name: str) -> Callable[[], Sequence[Sequence[Path]]]:
    def files() -> Sequence[Sequence[Path]]:
        from torchvision import datasets

        kind = getattr(datasets, name)
        return [(Path(kind.base_folder) / file,) for file, _ in (*kind.train_list, *kind.test_list)]

    return files


def _streams(of: str) -> tuple[str, ...]:
    return f"Split{of}", f"Permuted{of}", f"Rotated{of}"


_COLOUR = "60,000 colour images of 32 × 32"
DATA_SETS = {
    data.name: data
    for data in (
        DataSet("digits", "1,797 digits of 8 × 8, inside scikit-learn", "", _streams("Digits"), list, False),
        DataSet("MNIST", "70,000 digits of 28 × 28", "MNIST/raw", _streams("MNIST"), _idx("MNIST")),
        DataSet(
            "FashionMNIST",
            "70,000 clothes, 28 × 28",
            "FashionMNIST/raw",
            ("SplitFashionMNIST",),
            _idx("FashionMNIST"),
        ),
        DataSet(
            "CIFAR10", f"{_COLOUR}, 10 classes", "cifar-10-batches-py", ("SplitCIFAR10", "Combined"), _cifar("CIFAR10")
        ),
        DataSet(
            "CIFAR10-JPEG",
            "the same from JPEG of quality 75",
            "cifar10-jpeg",
            ("jpeg: true",),
            lambda: [(JPEG,)],
            False,
        ),
        DataSet("CIFAR100", f"{_COLOUR}, 100 classes", "cifar-100-python", ("SplitCIFAR100",), _cifar("CIFAR100")),
        DataSet("Omniglot", "30 alphabets", str(BACKGROUND), ("SplitOmniglot",), lambda: [(BACKGROUND,)]),
        DataSet(
            "Omniglot-small", "8 alphabets", "omniglot-small", ("SplitOmniglot",), lambda: [(f,) for f in SMALL], False
        ),
    )
}
"""Name → data set."""
