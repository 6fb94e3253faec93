"""A backbone that runs with other weights and another normalisation, untraced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def standing_in(
    weights: Mapping[str, Tensor],
    sites: Mapping[str, Sequence[tuple[nn.Module, str]]],
    norms: Sequence[tuple[nn.Module, nn.Module]],
) -> Iterator[None]:
    """Put tensors in the place of weights, and norms in the place of norms, for the length of a block.

    Args:
        weights: by name.
        sites: name of a weight → the modules that hold it, and under which name.
        norms: what the backbone has, and what stands in for it.
    """
    own: list[tuple[nn.Module, str, Any]] = []
    was = [(norm, norm._parameters, norm._buffers, norm.training) for norm, _ in norms]
    try:
        for name, weight in weights.items():
            for module, attribute in sites[name]:
                own.append((module, attribute, module._parameters[attribute]))
                module._parameters[attribute] = weight  # type: ignore[assignment]
        for norm, other in norms:
            norm._parameters, norm._buffers, norm.training = other._parameters, other._buffers, other.training
        yield
    finally:
        for module, attribute, value in own:
            module._parameters[attribute] = value
        for norm, parameters, buffers, training in was:
            norm._parameters, norm._buffers, norm.training = parameters, buffers, training
