"""Highest bytes come back from four bits each, and from what earlier versions wrote, and never take more than bytes."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from avalanche_amnesia.trajectory.high_bytes import expand_high, shrink_high

DRAWS = {
    "uniform": lambda n: torch.rand(n) * 0.2 - 0.1,
    "normal": lambda n: 0.02 * torch.randn(n),
    "zeros": torch.zeros,
    "ones": torch.ones,
    "of all sizes": lambda n: torch.randn(n) * 10 ** (60 * torch.rand(n) - 30),
    "not finite": lambda n: torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5] * n)[:n],
}


def highest(values):
    return values.view(torch.uint8).reshape(len(values), -1)[:, -1].numpy()


def one_by_one(coded, n):
    """The code read entry by entry: low halves of the bytes first, then the high ones."""
    half = (n + 1) // 2
    listed = iter(coded[2 + half :])
    result = []
    for at in range(n):
        byte = int(coded[2 + at % half])
        nibble = byte % 16 if at < half else byte // 16
        exponent = next(listed) if nibble % 8 == 7 else coded[1] - nibble % 8
        result.append(int(exponent) + 128 * (nibble >= 8))
    return result


@pytest.mark.parametrize("n", [1, 2, 31, 1000])
@pytest.mark.parametrize("draw", DRAWS)
def test_bytes_of_weights_come_back(draw, n):
    data = highest(DRAWS[draw](n))
    shrunk = shrink_high(data)
    assert np.array_equal(expand_high(shrunk, n), data)
    if len(shrunk) < n:
        assert one_by_one(shrunk.numpy(), n) == data.tolist()
    if n == 1000 and draw in ("uniform", "normal"):
        assert len(shrunk) < 0.52 * n


@given(data=st.binary(max_size=400))
def test_any_bytes_come_back_and_are_never_more(data):
    array = np.frombuffer(data, dtype=np.uint8)
    shrunk = shrink_high(array)
    assert len(shrunk) <= len(data)
    assert expand_high(shrunk, len(data)).tobytes() == data
    assert shrunk.numpy().flags.writeable


@pytest.mark.parametrize("draw", ["uniform", "normal", "zeros", "not finite"])
def test_what_earlier_versions_wrote_is_read(draw):
    data = highest(DRAWS[draw](1000))
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(data.tobytes()) + coder.flush()
    assert len(coded) < len(data)
    assert np.array_equal(expand_high(torch.frombuffer(bytearray(coded), dtype=torch.uint8), 1000), data)
