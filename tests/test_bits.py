"""The hash of a tensor covers its dtype, its shape and its bits in order."""

import pytest
import torch
from blake3 import blake3

from avalanche_amnesia import bits
from avalanche_amnesia.bits import model_hashes, tensor_hash

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
    "an entry, past the version counter": lambda held: held.data.view(-1)[4711].add_(1),
    "the last entry, through numpy": lambda held: held.numpy().reshape(-1).__setitem__(-1, 7),
    "all signs": lambda held: held.neg_(),
    "two rows": lambda held: held.copy_(held[[1, 0, *range(2, len(held))]]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("shape", [(128, 512), (64, 1019, 8), (9, 40004)])
def test_a_large_tensor_is_hashed_again_if_it_was_written_into(write, shape, monkeypatch):
    model, hashed = torch.nn.Module(), []
    for name in ("held", "other"):
        model.register_buffer(name, torch.randn(shape, dtype=torch.float64))
    model_hashes(model)
    WRITES[write](model.held)
    expected = {name: tensor_hash(tensor) for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(bits, "tensor_hash", lambda tensor: hashed.append(tensor) or tensor_hash(tensor))
    assert model_hashes(model) == expected
    assert len(hashed) == (write != "none")
