"""Traces of a forgotten task, and a check whether tensors hold one: a slow twin of the audit."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from avalanche_amnesia.bits import pack_bits


@dataclass
class TaskResidue:
    """Mask, head, embedding and written values of a task, which must be nowhere once it is forgotten."""

    mask: Tensor | None
    values: list[np.ndarray]

    def found_in(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if a tensor is the mask, or holds more of the values than by chance."""
        if self.mask is not None:
            packed = pack_bits(self.mask)
            for tensor in tensors:
                if tensor.shape == self.mask.shape and any(torch.equal(tensor > at, self.mask) for at in (0.0, 0.5)):
                    return True
                if tensor.dtype == packed.dtype and tensor.shape == packed.shape and torch.equal(tensor, packed):
                    return True
        held = np.unique(np.concatenate([integers(tensor) for tensor in tensors if tensor.dtype == torch.float32]))
        return any(len(own) > 4 and np.isin(own, held).mean() > 0.25 for own in self.values)


def tensors_within(root: object, skip: tuple[type, ...] = ()) -> list[Tensor]:
    """Every tensor that can be reached from an object through attributes and containers."""
    return [thing for thing in things_within(root, skip=skip) if isinstance(thing, Tensor)]


def things_within(root: object, skip: tuple[type, ...] = (), beside: Iterable[object] = ()) -> Iterator[object]:
    """Everything that can be reached from an object through attributes and containers, but for things beside it."""
    seen = {id(thing): thing for thing in beside}
    queue: list[Any] = [root]
    while queue:
        thing = queue.pop()
        if isinstance(thing, (int, float)):
            yield thing
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type, *skip)):
            continue
        seen[id(thing)] = thing
        yield thing.detach() if isinstance(thing, Tensor) else thing
        if isinstance(thing, Tensor):
            queue += [] if thing.grad is None else [thing.grad]
        elif isinstance(thing, dict):
            queue += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            queue += list(thing)
        elif hasattr(thing, "__dict__"):
            queue += list(vars(thing).values())
        if hasattr(thing, "func") and hasattr(thing, "args"):
            queue += [thing.func, *thing.args]


def integers(tensor: Tensor) -> np.ndarray:
    """The bits of a float32 tensor's distinct values."""
    return np.unique(tensor.detach().reshape(-1).contiguous().view(torch.int32).numpy())


def decay_alone(initial: Mapping[str, Tensor], optimizer: Optimizer, steps: int) -> np.ndarray:
    """Bits of all values that a decoupled decay gives to weights without a gradient (of pixels that are always dark).

    It does so in every task, so that these values reveal no task.
    """
    (group,) = optimizer.param_groups
    factor = 1 - group["lr"] * group.get("weight_decay", 0)
    values, found = [value.clone() for value in initial.values()], [np.empty(0, dtype=np.int32)]
    for _ in range(steps if isinstance(optimizer, AdamW) else 0):
        found += [integers(value.mul_(factor)) for value in values]
    return np.unique(np.concatenate(found))
