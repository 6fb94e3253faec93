"""Chosen entries: numpy's way is torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory.sparse import positions, put, take

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
    "every second": lambda t: t.repeat_interleave(2, 0)[::2] if t.dim() else t,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    shape=st.sampled_from([(), (0,), (5,), (3, 4), (2, 3, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64]),
    seed=st.integers(0, 2**20),
)
def test_reading_and_writing_are_those_of_an_index(layout, shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def drawn():
        return LAYOUTS[layout](torch.randint(-3, 4, shape, generator=generator).to(dtype))

    tensor, other = drawn(), drawn()
    where = torch.rand(tensor.shape, generator=generator) < 0.5
    assert same_bits(take(tensor, positions(where)), tensor[where]).all()
    expected, values = tensor.clone(), other[where]
    expected[where] = values
    put(tensor, positions(where), values)
    assert same_bits(tensor, expected).all()
