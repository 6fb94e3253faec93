"""Bitwise equality and hashes of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_WORTH_A_THREAD = 2**16
"""Bytes from which on hashing a tensor takes longer than handing it to a thread."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise equality of the stored bits: 0 and -0 differ, a NaN equals itself.

    Args:
        a: a real tensor.
        b: of the same shape and dtype.

    Returns:
        Bool tensor of the same shape.
    """
    return as_integers(a) == as_integers(b)


def as_integers(tensor: Tensor) -> Tensor:
    """The stored bits as integers of the same width; a view where the tensor is contiguous."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bits, as 64 hexadecimal digits."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """:func:`tensor_hash` of every tensor, by name in order of the names; in two threads, as hashing needs no lock."""
    large = [name for name, tensor in state.items() if tensor.nbytes > _WORTH_A_THREAD]
    hashes = dict(zip(large, map_two_threads(lambda name: tensor_hash(state[name]), large), strict=True))
    hashes |= {name: tensor_hash(tensor) for name, tensor in state.items() if tensor.nbytes <= _WORTH_A_THREAD}
    return dict(sorted(hashes.items()))


T = TypeVar("T")
R = TypeVar("R")


def map_two_threads(work: Callable[[T], R], things: Iterable[T]) -> list[R]:
    """Map ``work`` over things in two threads, in order; for work that hardly needs the interpreter (hashing, numpy).

    Args:
        work: called in two threads; gradients are recorded there unless it says otherwise.
        things: given to it one by one.
    """
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, things))
