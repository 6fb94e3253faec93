"""Search for learned state that a plugin or a strategy keeps and no purger knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.object_walk import Parts, reachable

# A strategy's attributes that the host fills for every strategy alike: what the package cleans itself, or a mini-batch.
_OF_EVERY_STRATEGY = frozenset(
    (
        *("model", "optimizer", "optimized_param_id", "plugins", "evaluator", "clock", "_criterion"),
        *("experience", "current_eval_stream", "_eval_streams", "adapted_dataset", "dataloader"),
        *("mbatch", "mb_output", "loss", "rollback_point"),
    )
)


class UnknownStateError(RequestError):
    """Something keeps learned state that no purger can clean; nothing has changed when it is raised."""


def learned_state(thing: object, skip: Iterable[object] = (), beside: Parts | None = None) -> str | None:
    """Path to the first tensor, array or data set that an object holds; None where it holds none."""
    parts: list[tuple[str, Any]] = [("", thing)]
    if _is_strategy(thing):
        parts = [
            (name, value) for name, value in own_attributes(thing).items() if beside is None or value not in beside
        ]
    others = [other for other in skip if other is not thing]
    found = (place for name, value in parts for place in reachable(value, name, others, beside=beside))
    return next((path for path, part in found if _is_state(part)), None)


def own_attributes(strategy: object) -> dict[str, Any]:
    """A strategy's attributes without those that every strategy has."""
    return {name: value for name, value in vars(strategy).items() if name not in _OF_EVERY_STRATEGY}


def _is_strategy(thing: object) -> bool:
    return hasattr(thing, "plugins") and hasattr(thing, "optimizer")


def _is_state(thing: object) -> bool:
    if isinstance(thing, Tensor):
        return thing.numel() > 0
    if isinstance(thing, np.ndarray):
        return thing.size > 0 and thing.dtype.kind in "fciub"
    if isinstance(thing, Dataset) or type(thing).__name__.endswith("Dataset"):
        return not hasattr(thing, "__len__") or len(thing) > 0
    return False
