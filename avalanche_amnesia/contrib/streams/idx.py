"""Files of the MNIST family in the layout that torchvision expects, read by it and left as they are."""

from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from avalanche_amnesia.contrib.streams.data_root import CorruptDataError, data_root, missing


def load_idx(name: str, root: str | Path | None, download: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test set of a torchvision data set of the MNIST family."""
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
