"""Bitwise equality and hashes of tensors."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

_BLAKE3 = "blake3:"
"""In front of a hash, which says so how it was made."""
_WORTH_THREADS = 2**24
"""Bytes from which on a second thread saves more time than starting it takes."""
_WORTH_UPDATE = 2**17
"""Bytes from which on a copy of them takes longer than a second call of blake3's, which lets other threads run."""
_WITHOUT_NUMPY = frozenset({torch.bfloat16, *(kind for name, kind in vars(torch).items() if name.startswith("float8"))})
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise equality of the stored bits: 0 and -0 differ, a NaN equals itself."""
    return as_integers(a) == as_integers(b)


def as_integers(tensor: Tensor) -> Tensor:
    """The stored bits as integers of the same width; a view where the tensor is contiguous."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """Sum of the stored bits of each tensor, as integers: cheaper than a hash, and no proof against malice."""
    sums = [_long(as_integers(tensor)).sum(dtype=torch.int64) for tensor in tensors]
    # One wait for an accelerator, where an optimizer counts its steps on the CPU.
    where = next((each.device for each in sums if not each.is_cpu), "cpu")
    return torch.stack([each.to(where) for each in sums]).tolist() if sums else []


def _long(bits: Tensor) -> Tensor:
    """Integers as half or a quarter as many of 64 bits, where these lie like that: to add them takes a third."""
    n = 8 // bits.element_size()
    return bits.view(-1).view(torch.int64) if not (bits.numel() % n or bits.storage_offset() % n) else bits


def tensor_hash(tensor: Tensor) -> str:
    """Hash of a tensor's dtype, shape and bits, by BLAKE3."""
    heading, data = _heading(tensor.dtype, tensor.shape), _flat_bytes(tensor)
    if data.nbytes < _WORTH_UPDATE:
        return f"{_BLAKE3}{blake3(heading + data).hexdigest()}"
    made = blake3(heading)
    made.update(data)
    return f"{_BLAKE3}{made.hexdigest()}"


@lru_cache(maxsize=4096)  # hundreds of tasks have tensors of few shapes, which take as long to write as to hash
def _heading(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _flat_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in the order of its entries ``(n,)``; no copy where they lie like that on the CPU."""
    if tensor.dtype in _WITHOUT_NUMPY:
        bits = tensor.detach().cpu().contiguous()
        # Not by its own strides: where a size is 1 these may be anything (kernels of 1×1 whose channels lie last).
        tensor = bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)
    return tensor.numpy(force=True).ravel().view(np.uint8).data


def state_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """:func:`tensor_hash` of every tensor, by name in order of the names."""
    names = sorted(state)
    hashes = map_two_threads(lambda name: tensor_hash(state[name]), names, sum(t.nbytes for t in state.values()))
    return dict(zip(names, hashes, strict=True))


T = TypeVar("T")
R = TypeVar("R")


def map_two_threads(work: Callable[[T], R], things: Iterable[T], nbytes: int) -> list[R]:
    """Map ``work``, which hardly needs the interpreter, in order; in two threads if it is much and torch has two."""
    things = list(things)
    if nbytes < _WORTH_THREADS or torch.get_num_threads() < 2:
        return list(map(work, things))
    results: list[Any] = [None] * len(things)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(lambda: list(map(work, things[1::2])))
        results[::2] = map(work, things[::2])
        results[1::2] = others.result()
    return results
