"""Binary masks of many tasks in few bytes: packed bits, and zlib's Huffman code across tasks.

Masks of successive tasks resemble each other, as one task's scores start where the last one's ended. So the bits that a
weight has in eight tasks make a byte, and a Huffman code of these bytes takes little more than their joint entropy:
much less than masks one by one. Every further group of eight is written as what differs from the mask before it.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GROUP = 8


def pack_bits(mask: Tensor) -> Tensor:
    """A bool mask ``(n,)`` as packed bytes, uint8 ``(⌈n/8⌉,)``, first entry in the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy())).to(mask.device)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The bool mask ``(n,)`` of what :func:`pack_bits` returned."""
    bits = np.unpackbits(packed.cpu().numpy(), count=n)
    return torch.from_numpy(bits.view(np.bool_)).to(packed.device)


def encode_masks(masks: Sequence[Tensor]) -> bytes:
    """The masks of several tasks, compressed together."""
    if any(mask.dtype != torch.bool or mask.ndim != 1 or len(mask) != len(masks[0]) for mask in masks):
        shapes = [f"{mask.dtype} {tuple(mask.shape)}" for mask in masks]
        raise ValueError(f"masks must be bool vectors of one length, got {shapes}")
    rows = [mask.cpu().numpy() for mask in masks]
    # No matches are looked for: there are none to find, and they would cost more than the Huffman code alone.
    coder = zlib.compressobj(level=9, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    code = b""
    for first in range(0, len(rows), _GROUP):
        group = np.stack(rows[first : first + _GROUP], axis=1)
        bits = np.zeros((len(group), _width(group.shape[1])), np.bool_)
        bits[:, : group.shape[1]] = group ^ rows[first - 1][:, None] if first else group
        code += coder.compress(np.packbits(bits).tobytes())
        code += coder.flush(zlib.Z_SYNC_FLUSH)  # so that every group has a Huffman code of its own
    return code + coder.flush()


def decode_masks(data: bytes, n_tasks: int, n: int) -> list[Tensor]:
    """The masks that :func:`encode_masks` compressed."""
    counts = [min(_GROUP, n_tasks - first) for first in range(0, n_tasks, _GROUP)]
    sizes = [-(-n * _width(count) // 8) for count in counts]
    coder = zlib.decompressobj()
    try:
        packed = np.frombuffer(coder.decompress(data, sum(sizes) + 1), np.uint8)
        if not coder.eof or coder.unused_data or len(packed) != sum(sizes):
            raise ValueError("too short or too long")
    except (zlib.error, ValueError) as error:
        raise ValueError(
            f"these {len(data)} bytes are no encoded masks of {n_tasks} tasks over {n} weights ({error}); give what "
            "encode_masks returned for as many masks of this length"
        ) from error
    rows: list[Tensor] = []
    for number, count in enumerate(counts):
        part = packed[sum(sizes[:number]) :]
        bits = np.unpackbits(part, count=n * _width(count)).view(np.bool_).reshape(n, _width(count))
        group = torch.from_numpy(bits[:, :count].T.copy())
        rows += group ^ rows[-1] if rows else group
    return rows


def _width(n_tasks: int) -> int:
    """Bits that a weight takes in a group: a power of two, so that no weight lies across two bytes."""
    return 1 << (n_tasks - 1).bit_length()
