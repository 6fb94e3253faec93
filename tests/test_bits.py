"""The hash of a tensor covers its dtype, its shape and its bits in order."""

import pytest
import torch
from blake3 import blake3

from avalanche_amnesia.bits import tensor_hash

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
