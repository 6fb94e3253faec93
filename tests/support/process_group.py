"""Groups of forked processes that train one model together."""

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from avalanche_amnesia.processes import rank
from support.forked import forked


class Failed(str):
    """Error of a process."""


def in_group(n: int, function: Callable[..., Any], *args: Any, timeout: float = 30, fails: bool = False) -> list[Any]:
    """Call a function that can be imported in each of ``n`` processes; return the results by rank.

    ``fails``: results are errors, as text, and None of a killed process.
    """
    with tempfile.TemporaryDirectory() as folder:
        group = [forked(_join, Path(folder), n, number, timeout, function, args) for number in range(n)]
        for process in group:
            process.join(4 * timeout)
            assert process.exitcode is not None, "a process of the group hangs"
        files = [Path(folder) / f"{number}.pkl" for number in range(n)]
        found = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    assert fails or not any(isinstance(each, Failed) for each in found), found
    return found


def _join(folder: Path, n: int, number: int, timeout: float, function: Callable[..., Any], args: Any) -> None:
    if n > 1:
        place, limit = f"file://{folder / 'group'}", timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=place, rank=number, world_size=n, timeout=limit)
    try:
        found = function(*args)
    except Exception as error:
        traceback.print_exc()
        found = Failed(f"{type(error).__name__}: {error}")
    unfinished = folder / f"{number}.unfinished"
    unfinished.write_bytes(pickle.dumps(found))
    unfinished.rename(folder / f"{number}.pkl")
    if n > 1 and not isinstance(found, Failed):
        dist.barrier()  # none leaves before the others need it no more


def is_last() -> bool:
    """Return True in the last process of the group."""
    return rank() == dist.get_world_size() - 1
