"""MNIST streams equal torchvision's data; missing and damaged files are named."""

import gzip
import shutil

import pytest
import torch
from torchvision import datasets, transforms

from avalanche_amnesia.contrib.streams import PermutedMNIST, RotatedMNIST, SplitFashionMNIST, SplitMNIST
from avalanche_amnesia.contrib.streams.image_sets import CorruptDataError, DataNotFoundError


@pytest.fixture(scope="module")
def extracted(data_root, tmp_path_factory):
    """A root with extracted files for torchvision."""
    root = tmp_path_factory.mktemp("extracted")
    for name in ("MNIST", "FashionMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for gz, _ in getattr(datasets, name).resources:
            (raw / gz.removesuffix(".gz")).write_bytes(gzip.decompress((data_root / name / "raw" / gz).read_bytes()))
    return root


@pytest.mark.parametrize(
    ("make", "name", "mean", "std"),
    [(SplitMNIST, "MNIST", 0.1307, 0.3081), (SplitFashionMNIST, "FashionMNIST", 0.2860, 0.3530)],
)
def test_standardised_images_equal_those_of_torchvision(make, name, mean, std, data_root, extracted):
    prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])
    reference = getattr(datasets, name)(extracted, train=False, transform=prepare)
    for root in (data_root, extracted):
        stream = make(root=root, n_train=10).test_stream
        for task, experience in enumerate(stream):
            where = torch.isin(reference.targets, torch.tensor(experience.original_classes)).nonzero()[:, 0]
            x, y = experience.tensors
            assert torch.equal(y + 2 * task, reference.targets[where])
            for item in range(0, len(where), 97):
                assert torch.equal(x[item], reference[int(where[item])][0])
                assert torch.equal(experience.dataset[item][0], x[item])


def test_the_environment_variable_sets_the_default_root(data_root, monkeypatch):
    monkeypatch.setenv("AMNESIA_DATA", str(data_root))
    assert len(SplitMNIST(n_train=100, n_test=50).train_stream) == 5
    monkeypatch.delenv("AMNESIA_DATA")
    with pytest.raises(DataNotFoundError, match=r"MNIST needs a data root: give root=.*AMNESIA_DATA"):
        SplitMNIST()


def test_missing_files_are_named_and_downloaded_by_torchvision(data_root, tmp_path, monkeypatch):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    shutil.copy(data_root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz", raw)
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte") as caught:
        SplitMNIST(root=tmp_path)
    message = str(caught.value)
    assert "t10k-labels" not in message
    for help_with in (str(raw), "AMNESIA_DATA", "download=True", "root="):
        assert help_with in message
    asked = []
    monkeypatch.setattr(datasets.MNIST, "download", lambda self: asked.append(str(self.root)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SplitMNIST(root=tmp_path, download=True)
    assert asked == [str(tmp_path)]


def test_damaged_files_are_named(data_root, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    shutil.copytree(data_root / "MNIST" / "raw", raw)
    raw.chmod(0o755)
    bad = raw / "t10k-labels-idx1-ubyte.gz"
    bad.chmod(0o644)
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptDataError, match=r"t10k-labels-idx1-ubyte.gz is not what was published \(its md5"):
        SplitMNIST(root=tmp_path)
    for content in (b"", b"\0\0\x08\x01", b"\0\0\x08\x01\0\0\0\x05abcd", b"\0\0\x0d\x01\0\0\0\x01a"):
        (raw / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(CorruptDataError, match="train-images-idx3-ubyte is not what was published"):
            SplitMNIST(root=tmp_path)


def test_rotations_equal_those_of_torchvision(data_root):
    angles = [0, 30, -75.5, 90]
    train = RotatedMNIST(4, angles=angles, root=data_root, n_train=10, n_test=10).train_stream
    plain = train[0].tensors[0]
    for experience, angle in zip(train, angles, strict=True):
        turned = experience.tensors[0]
        expected = transforms.functional.rotate(plain * 0.3081 + 0.1307, angle, transforms.InterpolationMode.BILINEAR)
        expected = (expected - 0.1307) / 0.3081
        torch.testing.assert_close(turned, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(experience.dataset[3][0], turned[3], atol=1e-6, rtol=0)


def test_angles_are_evenly_spaced_by_default_and_corners_are_black(data_root):
    few = {"root": data_root, "n_train": 10, "n_test": 10}
    stream = RotatedMNIST(4, **few).train_stream
    assert [e._samples.transform.steps[1].degrees for e in list(stream)[1:]] == [30.0, 60.0, 90.0]
    assert torch.equal(stream[0].tensors[0], PermutedMNIST(1, **few).train_stream[0].tensors[0])
    corner = stream[1].tensors[0][:, 0, 0, 0]
    torch.testing.assert_close(corner, torch.full((10,), -0.1307 / 0.3081))
    with pytest.raises(ValueError, match="2 angles for 3 tasks"):
        RotatedMNIST(3, angles=[0, 10], **few)
