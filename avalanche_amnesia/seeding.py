"""Seeds derived from a draw's purpose, and functions to store and restore the global random generators."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from avalanche_amnesia import checks


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed computed only from ``seed`` and from words or numbers that name the draw's purpose."""
    text = "/".join(str(part) for part in (checks.whole_number("seed", seed, None), *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


RngState = tuple[Any, ...]


def torch_rng_state() -> RngState:
    """Return the state of torch's global random generators, of the CPU and of GPUs."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def rng_state() -> RngState:
    """Return the state of the global random generators of torch, Python and numpy."""
    return *torch_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - Avalanche uses it


def set_rng_state(state: RngState) -> None:
    """Restore the state of generators that :func:`rng_state` or :func:`torch_rng_state` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    if len(state) > 2:
        random.setstate(state[2])
        np.random.set_state(state[3])  # noqa: NPY002


def comparable_rng_state() -> tuple[Any, ...]:
    """Return the states of the CPU's global random generators as values that can be compared."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist(), of_numpy[2:]


def seed_all(seed: int) -> None:
    """Seed the global random generators of torch, Python and numpy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # same numbers; manual_seed would store the caller's stack at every call, for devices initialized later
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the global random generators of torch, Python and numpy at the end of the ``with`` block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
