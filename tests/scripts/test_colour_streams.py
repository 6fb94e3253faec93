"""CIFAR and Omniglot have torchvision's images and the right tasks."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from torchvision import datasets

from avalanche_amnesia.contrib.streams import SplitCIFAR10, SplitCIFAR100
from avalanche_amnesia.contrib.streams.image_sets import CorruptDataError, DataNotFoundError
from experiments.omniglot import SplitOmniglot

KIND = datasets.CIFAR100


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with few images in the files of CIFAR-100, with checksums that torchvision accepts."""
    folder = tmp_path / KIND.base_folder
    folder.mkdir()
    drawn = np.random.default_rng(0)

    def written(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    for part in ("train_list", "test_list"):
        files = []
        for name, _ in getattr(KIND, part):
            images = drawn.integers(0, 256, (200, 3072), dtype=np.uint8)
            labels = drawn.permutation(np.arange(200) % 100).tolist()
            files.append([name, written(name, {"data": images, "fine_labels": labels})])
        monkeypatch.setattr(KIND, part, files)
    names = written(KIND.meta["filename"], {KIND.meta["key"]: [str(n) for n in range(100)]})
    monkeypatch.setattr(KIND, "meta", {**KIND.meta, "md5": names})
    return tmp_path


def test_images_and_labels_equal_those_of_torchvision(root):
    benchmark = SplitCIFAR100(root=root)
    assert len(benchmark.train_stream) == 20
    for train, stream in ((True, benchmark.train_stream), (False, benchmark.test_stream)):
        reference = KIND(root, train=train)
        for experience in stream:
            where = np.isin(reference.targets, experience.original_classes).nonzero()[0]
            x, y = experience.tensors
            pixels = torch.from_numpy(reference.data[where]).permute(0, 3, 1, 2) / 255
            assert torch.equal(x, (pixels - 0.478) / 0.268)
            assert [experience.original_classes[label] for label in y] == [reference.targets[i] for i in where]


def test_damaged_and_missing_files_are_named_and_downloaded_by_torchvision(root, monkeypatch):
    damaged = root / KIND.base_folder / KIND.train_list[0][0]
    damaged.write_bytes(damaged.read_bytes() + b"x")
    with pytest.raises(CorruptDataError, match="not what was published"):
        SplitCIFAR100(root=root)
    damaged.unlink()
    with pytest.raises(DataNotFoundError, match=rf"{damaged.name} of {KIND.base_folder} missing.*download=True"):
        SplitCIFAR100(root=root)
    asked = []
    monkeypatch.setattr(KIND, "download", lambda self: asked.append(self.root))
    with pytest.raises(CorruptDataError):  # torchvision downloaded nothing
        SplitCIFAR100(root=root, download=True)
    assert asked == [root]
    monkeypatch.delenv("AMNESIA_DATA", raising=False)
    with pytest.raises(DataNotFoundError, match="AMNESIA_DATA"):
        SplitCIFAR100()
    with pytest.raises(DataNotFoundError, match=r"cifar10_jpeg\.npz missing"):
        SplitCIFAR10(root=root, jpeg=True)


def test_cifar_from_jpeg_is_balanced_and_close_to_standard(data_root):
    benchmark = SplitCIFAR10(root=data_root, jpeg=True, n_train=500)
    x = torch.cat([experience.tensors[0] for experience in benchmark.train_stream])
    assert x.shape == (500, 3, 32, 32)
    assert abs(float(x.mean())) < 0.1
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    assert all(y.bincount().tolist() == [1000, 1000] for _, y in (e.tensors for e in benchmark.test_stream))


def test_omniglot_has_an_alphabet_per_task(data_root):
    benchmark = SplitOmniglot(root=data_root)
    sizes = [len(e.original_classes) for e in benchmark.train_stream]
    assert (len(sizes), sum(sizes)) == (8, 242)
    for trained, tested in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        assert trained.tensors[1].bincount().tolist() == [14] * len(trained.original_classes)
        assert tested.tensors[1].bincount().tolist() == [6] * len(trained.original_classes)
    rows = [experience.tensors[0].flatten(1) for stream in benchmark.streams.values() for experience in stream]
    assert len({row.numpy().tobytes() for part in rows for row in part}) > 4838  # of 4,840: none appears twice
