"""Highest bytes of weights in four bits each, taken apart at the speed of memory.

The highest byte of a number is its sign and most of its exponent. Of weights that were drawn within bounds seven
neighbouring exponents make up all but one in a few thousand. zlib's Huffman code, which earlier versions wrote, takes a
sixth of a byte less, and seven times as long to read: it was the largest part of an undo.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

_FORM = 1
"""First byte of this code; that of zlib is another. The second one is the largest of the seven exponents."""
_LISTED = 7
"""Code of an exponent that is none of the seven."""


def shrink_high(data: np.ndarray) -> Tensor:
    """Bytes in the code of four bits, or as they are where that is no longer (uint8).

    Args:
        data: uint8 ``(n,)``.
    """
    exponents = data & 127
    found = np.bincount(exponents, minlength=128)
    largest = _LISTED - 1 + int(np.convolve(found, np.ones(_LISTED, dtype=int), "valid").argmax())
    codes = np.minimum(np.uint8(largest) - exponents, np.uint8(_LISTED))  # what is above the largest wraps around
    halves = np.zeros((2, -(-len(data) // 2)), dtype=np.uint8)
    halves.reshape(-1)[: len(data)] = codes + np.uint8(8) * (data > 127)
    coded = np.concatenate([[_FORM, largest], halves[0] + np.uint8(16) * halves[1], exponents[codes == _LISTED]])
    return torch.from_numpy(coded.astype(np.uint8) if len(coded) < len(data) else data.copy())


def expand_high(shrunk: Tensor, n: int) -> np.ndarray:
    """The ``n`` bytes that :func:`shrink_high`, or an earlier version, was given; not to be written to."""
    data = shrunk.numpy()
    if len(data) == n:
        return data
    if data[0] != _FORM:
        return np.frombuffer(zlib.decompress(data.data, bufsize=n), dtype=np.uint8)
    packed, listed = np.split(data[2:], [-(-n // 2)])
    halves = np.concatenate([packed & 15, packed // 16])[:n]
    codes = halves & 7
    result = data[1] - codes
    result[np.flatnonzero(codes == _LISTED)] = listed
    result += np.uint8(16) * (halves & 8)  # the sign; numpy multiplies many times as fast as it shifts
    return result
