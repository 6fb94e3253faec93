"""Chosen entries of a tensor: positions, reading, writing.

On the CPU by way of numpy: torch does such work in several threads, which wait for each other, and on a busy machine
takes ten times as long.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from avalanche_amnesia.bits import as_integers


def positions(where: Tensor) -> Tensor:
    """Flat index ``(k,)`` of the True entries of a bool tensor, on its device."""
    if where.device.type != "cpu":
        return where.reshape(-1).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(where.numpy()))


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Values ``(k,)`` of the entries at flat ``index``."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type != "cpu":
        return flat.index_select(0, index)
    return torch.from_numpy(as_integers(flat).numpy().take(index.numpy())).view(flat.dtype)


def put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """Set the entries at flat ``index`` to ``values`` ``(k,)``, in place."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        flat = tensor.reshape(-1)
        put(flat, index, values)
        tensor.copy_(flat.reshape(tensor.shape))
    elif tensor.device.type == "cpu":
        as_integers(tensor).reshape(-1).numpy()[index.numpy()] = as_integers(values).numpy()
    else:
        tensor.view(-1).index_copy_(0, index, values)


def chosen(tensor: Tensor, where: Tensor) -> Tensor:
    """Values ``(k,)`` of the entries at which a bool tensor of the same shape is True."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor[where]
    return torch.from_numpy(as_integers(tensor).numpy()[where.numpy()]).view(tensor.dtype)


def fill(tensor: Tensor, where: Tensor, values: Tensor) -> None:
    """Set the entries at which a bool tensor of the same shape is True to ``values`` ``(k,)``, in place."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        as_integers(tensor).numpy()[where.numpy()] = as_integers(values).numpy()
    else:
        tensor[where] = values


def copied(tensor: Tensor) -> Tensor:
    """A flat copy on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return torch.from_numpy(as_integers(tensor).numpy().reshape(-1).copy()).view(tensor.dtype)
