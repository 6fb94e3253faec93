"""Bitwise equality and hashes of tensors, and bool masks packed into bits."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

_BLAKE3 = "blake3:"
"""Prefix of each hash: the name of the hash function."""
_WITHOUT_NUMPY = frozenset({torch.bfloat16, *(kind for name, kind in vars(torch).items() if name.startswith("float8"))})
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KNOWN: WeakKeyDictionary[nn.Module, dict[str, tuple[bytes, str]]] = WeakKeyDictionary()
"""Model → name of a tensor → its sums, if it is large, and its hash."""


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return a bool tensor, True where two tensors have the same stored bits: 0 and -0 differ, a NaN equals itself."""
    return as_integers(a) == as_integers(b)


def as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor's stored bits as integers of the same width; a view (no copy) if the tensor is contiguous."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a bool mask ``(n,)`` into uint8 ``(⌈n/8⌉,)``, first entry in the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy())).to(mask.device)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Return the bool mask ``(n,)`` that :func:`pack_bits` packed."""
    return torch.from_numpy(np.unpackbits(packed.cpu().numpy(), count=n).view(np.bool_)).to(packed.device)


def tensor_hash(tensor: Tensor) -> str:
    """Return the BLAKE3 hash of a tensor's dtype, shape and bits."""
    made = blake3(_header(tensor.dtype, tensor.shape))
    made.update(_flat_bytes(tensor))
    return f"{_BLAKE3}{made.hexdigest()}"


@lru_cache(maxsize=4096)  # formatting a shape takes as long as hashing a small tensor, and few shapes occur
def _header(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _flat_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in the order of its entries, ``(n,)``; no copy if the tensor is contiguous on the CPU."""
    if tensor.dtype in _WITHOUT_NUMPY:
        bits = tensor.detach().cpu().contiguous()
        # Replace the strides: those of dimensions of size 1 are arbitrary (1×1 kernels in channels-last format).
        tensor = bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)
    return tensor.numpy(force=True).ravel().view(np.uint8).data


def state_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a dict of tensor name to :func:`tensor_hash` for every tensor in ``state``, sorted by name."""
    return {name: tensor_hash(state[name]) for name in sorted(state)}


def model_hashes(model: nn.Module, same: Collection[str] = ()) -> dict[str, str]:
    """Return tensor name → hash; reuse the last hash of tensors in ``same`` or with unchanged :func:`sums_of_bits`."""
    known, found = _KNOWN.get(model, {}), {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        sums, last = b"" if name in same or tensor.nbytes < 2**17 else sums_of_bits(tensor), known.get(name, (b"", ""))
        found[name] = last if name in same or (sums and sums == last[0]) else (sums, tensor_hash(tensor))
    _KNOWN[model] = found
    return {name: digest for name, (_, digest) in found.items()}


def sums_of_bits(tensor: Tensor) -> bytes:
    """Return a fast digest of a tensor's dtype, shape and bits (1,021 sums of 64-bit words), to notice changes.

    The sums differ after every change of one word. 1,021 is a prime, so that regular changes do not cancel.
    """
    held, made = _flat_bytes(tensor), blake3(_header(tensor.dtype, tensor.shape))
    # An odd number, or 0: else flips of the highest bit of all words would cancel in pairs.
    rows = max(len(held) // (8 * 1021) - 1 | 1, 0)
    words = np.frombuffer(held, np.uint64, rows * 1021).reshape(rows, 1021)
    made.update(words.sum(0).tobytes() + held[words.nbytes :])
    return bytes(made.digest())
