"""Backbones of one tensor, several, or a mapping of tensors; sizes that are free, and sizes that are not."""

import copy
import pickle

import pytest
import torch
from support.soundness_oracle import assert_sound, some_mask
from torch import nn

from avalanche_amnesia import MaskedModel, ModelError


class TwoTensors(nn.Module):
    """A layer each, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, left, right):
        return self.c(torch.tanh(self.a(left) + self.b(right)))


class Words(nn.Module):
    """Mean of embeddings of what is no padding, as a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.c = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, input_ids, attention_mask=None):
        share = attention_mask.unsqueeze(-1).to(self.e.weight.dtype)
        states = torch.tanh(self.e(input_ids))
        return {"states": states, "pooled": self.c((states * share).sum(1) / share.sum(1))}


LEFT, RIGHT = torch.randn(2, 6), torch.randn(2, 3)
TOKENS = {"input_ids": torch.randint(9, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}
CASES = {
    "tuple": (TwoTensors, (LEFT, RIGHT), {}),
    "names": (TwoTensors, {"right": RIGHT, "left": LEFT}, {}),
    "a mapping of tokens": (Words, TOKENS, {}),
    "one tensor": (lambda: nn.Linear(6, 4), LEFT, {}),
}


def rows(x, index):
    """Some samples of a batch."""
    if isinstance(x, dict):
        return {name: part[index] for name, part in x.items()}
    return tuple(part[index] for part in x) if isinstance(x, tuple) else x[index]


@pytest.mark.parametrize("name", CASES)
def test_batches_of_any_form_and_size(name):
    make, example, options = CASES[name]
    torch.manual_seed(0)
    backbone = make().eval()
    model = MaskedModel(copy.deepcopy(backbone), example=example, **options).eval()
    everything = torch.ones(model.n_units)
    for size in (1, 2, 7):
        x = rows(example, torch.arange(size) % 2)
        with torch.no_grad():
            plain = backbone(**x) if isinstance(x, dict) else backbone(*x) if isinstance(x, tuple) else backbone(x)
            expected = plain["pooled"] if isinstance(plain, dict) else plain
            assert torch.allclose(model.masked_features(x, everything), expected, atol=1e-6)
    assert pickle.loads(pickle.dumps(model)).masked_features(x, everything).shape == (7, 4)


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        ("tokens", TypeError, "example must be a batch.*got str"),
        ((LEFT, None), TypeError, "tuple with a NoneType"),
        ((), TypeError, "example must be a batch"),
        ((LEFT, RIGHT[:1]), ValueError, "the same number"),
        ((LEFT[:0], RIGHT[:0]), ValueError, "at least one sample"),
    ],
)
def test_what_is_no_batch_is_refused(example, error, message):
    with pytest.raises(error, match=message):
        MaskedModel(TwoTensors(), example=example)


def test_a_shape_and_an_example_are_too_much():
    with pytest.raises(ValueError, match="not both"):
        MaskedModel(nn.Linear(6, 4), input_shape=(6,), example=LEFT)


def test_an_example_of_one_sample_does_not_fix_the_batch():
    model = MaskedModel(TwoTensors(), example=(LEFT[:1], RIGHT[:1])).eval()
    assert model.masked_features((LEFT, RIGHT), torch.ones(model.n_units)).shape == (2, 4)


class SizedByHand(nn.Module):
    """A mean that divides by the number of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.c = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.relu(self.k(x))
        return self.c(h.sum((2, 3)) / (h.shape[2] * h.shape[3]))


def test_sizes_that_the_forward_reads_stay_free():
    backbone = SizedByHand().eval()
    model = MaskedModel(copy.deepcopy(backbone)).eval()  # on a size that is found by trying
    for side in (8, 5):
        x = torch.randn(2, 1, side, side)
        with torch.no_grad():
            assert torch.allclose(model.masked_features(x, torch.ones(model.n_units)), backbone(x), atol=1e-6)


class OnePath(SizedByHand):
    """Small images take another path."""

    def forward(self, x):
        return super().forward(x) if x.shape[2] < 9 else super().forward(x[:, :, ::2, ::2]) + 1


def test_a_size_that_decides_is_not_silently_another():
    model = MaskedModel(OnePath(), input_shape=(1, 8, 8)).eval()
    x = torch.randn(2, 1, 20, 20)
    with pytest.raises(ModelError, match=r"read for .*input_shape=\(1, 20, 20\)"):
        model.masked_features(x, torch.ones(model.n_units))


class Parted(nn.Module):
    """Returns more than one tensor."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.l, self.kind = nn.Linear(4, 4), kind

    def forward(self, h, *, scale=1.0):
        h = torch.tanh(self.l(h)) * scale
        return {"dict": {"states": h, "none": None}, "tuple": (h.sum(1), h)}[self.kind]


class Around(nn.Module):
    """A declared part between two layers."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.a, self.p, self.c = nn.Linear(6, 4), Parted(kind), nn.Linear(4, 3)

    def forward(self, x):
        parts = self.p(self.a(x), scale=0.5)
        return self.c(parts["states"] if isinstance(parts, dict) else parts[1] + parts[0].unsqueeze(1))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
@pytest.mark.parametrize("declared", ["frozen", "task_owned"])
def test_declared_parts_may_return_anything(kind, declared):
    backbone = Around(kind).eval()
    model = MaskedModel(copy.deepcopy(backbone), **{declared: ["p"]}).eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.allclose(model.masked_features(x, torch.ones(model.n_units)), backbone(x), atol=1e-6)
    assert_sound(model, x, some_mask(model, 3).float())
