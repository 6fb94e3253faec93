"""The hash of a tensor covers its dtype, its shape and its bits in order."""

import pytest
import torch
from blake3 import blake3

from avalanche_amnesia import bits
from avalanche_amnesia.bits import model_hashes, state_hashes, tensor_hash

LAYOUTS = {
    "transposed": torch.randn(3, 4, 5).transpose(0, 2),
    "in steps": torch.randn(10)[::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "a kernel of 1×1 whose channels lie last": torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last": torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last),
    "a number": torch.tensor(3),
    "a parameter": torch.nn.Parameter(torch.randn(7)),
    "without numpy": torch.randn(3, 4).bfloat16().T,
    "one of these alone": torch.tensor(3.0).bfloat16(),
    "much": torch.arange(2**17),
    "much, transposed": torch.randn(300, 200).T,
    "none of these": torch.zeros(0, 3).bfloat16(),
    "eight bits": torch.randn(6).to(torch.float8_e4m3fn),
    "complex": torch.randn(4, dtype=torch.complex64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hash_covers_the_bits_in_logical_order(layout):
    tensor = LAYOUTS[layout]
    flat = tensor.detach().contiguous().clone().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    told = f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bytes(flat.tolist())
    assert tensor_hash(tensor) == f"blake3:{blake3(told).hexdigest()}"


WRITES = {
    "none": lambda held: None,
    "one entry, past the version counter": lambda held: held.data.view(-1)[4711].add_(1),
    "the last entry, through numpy": lambda held: held.detach().numpy().reshape(-1).__setitem__(-1, 7),
    "signs of all": lambda held: held.neg_(),
    "signs of a row": lambda held: held[3].neg_(),
    "signs of a column": lambda held: held[:, 3].neg_(),
    "all doubled": lambda held: held.mul_(2),
    "two rows swapped": lambda held: held.copy_(held[[1, 0, *range(2, len(held))]]),
    "reversed": lambda held: held.copy_(held.flip(0)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32])
@pytest.mark.parametrize("shape", [(128, 512), (784, 301), (64, 64, 3, 3), (9, 40004)])
def test_hashes_of_a_model_follow_every_write(write, dtype, shape):
    model = torch.nn.Module()
    model.register_buffer("held", (100 * torch.randn(shape)).to(dtype))
    assert model_hashes(model) == state_hashes(model.state_dict())
    WRITES[write](model.held)
    assert model_hashes(model) == state_hashes(model.state_dict())


def test_a_large_tensor_that_stays_is_not_hashed_again(monkeypatch):
    model = torch.nn.ModuleDict({"large": torch.nn.Linear(300, 300), "other": torch.nn.Linear(300, 300)})
    first = model_hashes(model)
    model.other.weight.data[0, 0] += 1
    hashed = []
    monkeypatch.setattr(bits, "tensor_hash", lambda tensor: hashed.append(tensor.shape) or tensor_hash(tensor))
    moved = {name for name, digest in model_hashes(model).items() if digest != first[name]}
    assert moved == {"other.weight"}
    assert hashed.count((300, 300)) == 1
