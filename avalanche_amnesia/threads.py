"""Work on many tensors in two threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
