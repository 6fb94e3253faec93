"""Communication between processes that train one model together, in torch.distributed's default process group."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessError(RuntimeError):
    """Error if a process of the group has ended, or if its data, seeds or tensors differ from those of process 0."""


def n_processes() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process in its group, from 0."""
    return dist.get_rank() if n_processes() > 1 else 0


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Replace a communication error in the ``with`` block by a ProcessError that explains it."""
    try:
        yield
    except RuntimeError as error:
        cause = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]  # without the place in torch's source
        raise ProcessError(
            f"process {rank()} of {n_processes()}: another process has ended with an error, or did not answer within "
            f"the group's timeout ({cause}). Start all processes again, from the last saved state"
        ) from error


def sum_all(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all processes, with the same bits on each; ``values`` is overwritten."""
    with _explain_errors():
        dist.all_reduce(values)
    return values


def from_all(obj: Any) -> list[Any]:
    """Gather each process's ``obj`` (any picklable object), and return the list, in rank order, on every process."""
    if n_processes() == 1:
        return [obj]
    found = [None] * n_processes()
    with _explain_errors():
        dist.all_gather_object(found, obj)
    return found


def from_first(obj: Any) -> Any:
    """Broadcast process 0's ``obj`` (any picklable object) to all processes, and return it on each."""
    return from_all(obj if rank() == 0 else None)[0]


def run_first(work: Callable[[], object]) -> None:
    """Call ``work()`` in process 0 only, while all other processes wait; raise its error in all processes."""
    failure: Exception | None = None
    if rank() == 0:
        try:
            work()
        except Exception as error:
            failure = error
    if (failure := from_first(failure)) is not None:
        raise failure


def check_equal(facts: Mapping[str, Any], when: str) -> None:
    """Raise ProcessError on all processes if their ``facts`` (values by name) differ; ``when`` begins the message."""
    first, *others = from_all(dict(facts))
    for number, other in enumerate(others, 1):
        for name in (name for name in {**first, **other} if first.get(name) != other.get(name)):
            raise ProcessError(
                f"{when} process {number} differs from process 0 in the {name}: {other.get(name)} instead of "
                f"{first.get(name)}. All processes must run the same script, with the same data, seeds and versions, "
                "and nothing in a model, loss or plugin may depend on one process's own samples"
            )


def gather_rows(*tensors: Tensor) -> list[Tensor]:
    """Gather each tensor's rows from all processes, and return them joined in rank order; row counts may differ."""
    if n_processes() == 1:
        return list(tensors)
    everywhere = from_all([tensor.detach().cpu() for tensor in tensors])
    return [torch.cat(rows).to(own.device) for own, *rows in zip(tensors, *everywhere, strict=True)]
