"""Bitwise equality and hashes of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_WORTH_THREADS = 2**20
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
    names = sorted(state)
    hashes = map_two_threads(lambda name: tensor_hash(state[name]), names, sum(t.nbytes for t in state.values()))
    return dict(zip(names, hashes, strict=True))


T = TypeVar("T")
R = TypeVar("R")


def map_two_threads(work: Callable[[T], R], things: Iterable[T], nbytes: int) -> list[R]:
    """Map ``work`` over things in two threads, in order; for work that hardly needs the interpreter (hashing, numpy).

    Args:
        work: called in two threads; gradients are recorded there unless it says otherwise.
        things: given to it one by one.
        nbytes: that it reads or writes in all; for few of them starting threads would take longer than the work.
    """
    if nbytes < _WORTH_THREADS:
        return list(map(work, things))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, things))
