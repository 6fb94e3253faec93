"""Chosen entries of a tensor are stored in few bytes, and every bit is restored."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory.sparse import (
    SparseValues,
    chosen_by,
    expand,
    pack,
    positions,
    put,
    shrink,
    take,
    unpack,
)

SHAPE = (4, 5)
CHOICES = st.lists(st.booleans(), min_size=20, max_size=20).map(lambda flat: torch.tensor(flat).reshape(SHAPE))
INDICES = st.lists(st.integers(0, 19), max_size=6, unique=True).map(torch.tensor).map(torch.Tensor.long)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45])
"""Values that a comparison, or arithmetic, would not restore."""


def drawn(dtype=torch.float32, seed=0):
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    values[0] = ODD
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(where=CHOICES)
def test_positions_and_bits_are_restored(dtype, where):
    tensor = drawn(dtype)
    entries = SparseValues.of(tensor, where)
    assert (entries.shape, entries.dtype) == (SHAPE, dtype)
    assert torch.equal(entries.where, where)
    assert same_bits(entries.values, tensor[where]).all()
    assert same_bits(entries.before(torch.zeros(int(where.sum()), dtype=dtype)), tensor[where]).all()
    assert entries.nbytes == sum(part.nbytes for part in entries.parts.values())


def test_there_may_be_no_entries():
    nothing = SparseValues.none(drawn())
    assert not nothing.where.any()
    assert nothing.where.shape == SHAPE
    assert len(nothing.values) == 0


@given(where=CHOICES, index=INDICES)
def test_entries_are_added_or_replaced(where, index):
    tensor, other = drawn(), drawn(seed=1).reshape(-1)
    extended = SparseValues.of(tensor, where).extended(index, other[index])
    expected = where.reshape(-1).clone()
    expected[index] = True
    assert torch.equal(extended.where.reshape(-1), expected)
    values = tensor.reshape(-1).clone()
    values[index] = other[index]
    assert same_bits(extended.values, values[expected]).all()


@given(where=CHOICES, keep=CHOICES)
def test_entries_are_restricted_joined_and_given_other_values(where, keep):
    tensor, other = drawn(), drawn(seed=1)
    entries = SparseValues.of(tensor, where)
    kept = entries.restricted(keep.reshape(-1))
    assert torch.equal(kept.where, where & keep)
    assert same_bits(kept.values, tensor[where & keep]).all()
    rebased = entries.rebased(other[where], tensor[where])
    assert torch.equal(rebased.where, where)
    assert same_bits(rebased.values, other[where]).all()
    bits = chosen_by([entries, SparseValues.of(tensor, keep)])
    assert torch.equal(torch.from_numpy(np.unpackbits(bits, count=20).view(bool)), (where | keep).reshape(-1))


@given(where=st.lists(st.booleans(), min_size=1, max_size=300).map(torch.tensor))
def test_packed_bools_are_restored_and_take_at_most_a_bit_each(where):
    packed = pack(where)
    assert torch.equal(unpack(packed, len(where)), where)
    assert packed.nbytes <= -(-len(where) // 8)


def test_an_outer_product_takes_few_bytes():
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.rand(n, generator=generator) < 0.3 for n in (200, 100))
    assert pack(rows[:, None] & columns).nbytes < 0.1 * 200 * 100 / 8


@given(data=st.binary(max_size=400))
def test_compressed_bytes_are_restored_and_never_longer(data):
    array = np.frombuffer(data, dtype=np.uint8)
    shrunk = shrink(array)
    assert shrunk.nbytes <= len(data)
    assert expand(shrunk, len(data)).tobytes() == data


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
def test_take_and_put_equal_indexing(layout, shape, dtype, seed):
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
