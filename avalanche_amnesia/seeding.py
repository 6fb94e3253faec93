"""Seeds derived from what a draw is for, never from a running global stream."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from avalanche_amnesia import checks


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and on the draw's purpose only."""
    text = "/".join(str(part) for part in (checks.whole_number("seed", seed, None), *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


RngState = tuple[torch.Tensor, list[torch.Tensor], Any, Any]


def rng_state() -> RngState:
    """State of the global random streams of torch, Python and numpy."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()  # noqa: NPY002 - the host draws from it


def set_rng_state(state: RngState) -> None:
    """Put the global random streams into a state."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    random.setstate(state[2])
    np.random.set_state(state[3])  # noqa: NPY002


def seed_all(seed: int) -> None:
    """Seed the global random streams."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same stream; manual_seed would keep the caller's stack for devices that may come, at every call
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the global random streams of torch, Python and numpy as they were."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
