"""Which units stand behind the entries of a value that flows through a backbone.

A value of the traced network has one entry per channel (or per feature, once flattened). The classes here say,
as a small expression tree, which weighted layers' units those entries are; :meth:`Units.usage` evaluates the tree
on per-layer masks. Max and repeat are all it needs, so the same tree serves binary masks, soft masks and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class UnitsError(ValueError):
    """Two values do not fit together unit by unit."""


class Units:
    """One entry per channel of a value; ``size`` is their number, ``None`` while it is not known yet."""

    size: int | None

    def resolved(self, size: int) -> Units:
        """The same expression, its open sizes settled by a consumer that reads ``size`` entries."""
        if self.size != size:
            raise UnitsError(f"{self.size} entries where {size} are read")
        return self

    def usage(self, masks: Mapping[str, Tensor], always: float = 1) -> Tensor:
        """Mask of the entries, shape ``(…, size)``, from the masks of the layers, each of shape ``(…, units)``.

        ``always`` is what the network's own input counts as: 1 for masks, the number of tasks for counts.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Inputs(Units):
    """The network's own input: no mask ever covers it, so it counts as always in use (METHOD §2)."""

    size: int | None = None

    def resolved(self, size: int) -> Units:
        if self.size not in (None, size):
            raise UnitsError(f"{self.size} inputs where {size} are read")
        return Inputs(size)

    def usage(self, masks: Mapping[str, Tensor], always: float = 1) -> Tensor:
        if self.size is None:
            raise UnitsError("the number of inputs is not known")
        some = next(iter(masks.values()))
        return some.new_full((*some.shape[:-1], self.size), always)


@dataclass(frozen=True)
class LayerUnits(Units):
    """The units of one weighted layer."""

    layer: str
    size: int

    def usage(self, masks: Mapping[str, Tensor], always: float = 1) -> Tensor:
        return masks[self.layer]


@dataclass(frozen=True)
class AnyOf(Units):
    """Values added up (residual): an entry is in use if any of them uses it."""

    parts: tuple[Units, ...]

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return next((part.size for part in self.parts if part.size is not None), None)

    def resolved(self, size: int) -> Units:
        return AnyOf(tuple(part.resolved(size) for part in self.parts))

    def usage(self, masks: Mapping[str, Tensor], always: float = 1) -> Tensor:
        result = self.parts[0].usage(masks, always)
        for part in self.parts[1:]:
            result = torch.maximum(result, part.usage(masks, always))
        return result


@dataclass(frozen=True)
class Concatenated(Units):
    """Values put side by side along the channels: so are their masks."""

    parts: tuple[Units, ...]

    @property
    def size(self) -> int | None:  # type: ignore[override]
        sizes = [part.size for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def resolved(self, size: int) -> Units:
        unknown = [part for part in self.parts if part.size is None]
        rest = size - sum(part.size or 0 for part in self.parts)
        if len(unknown) > 1 or (unknown and rest < 1) or (not unknown and rest):
            raise UnitsError(f"{len(unknown)} parts of unknown width in a concatenation of {size} entries")
        return Concatenated(tuple(part.resolved(rest if part.size is None else part.size) for part in self.parts))

    def usage(self, masks: Mapping[str, Tensor], always: float = 1) -> Tensor:
        return torch.cat([part.usage(masks, always) for part in self.parts], dim=-1)


@dataclass(frozen=True)
class Flattened(Units):
    """Channels × positions laid out in one row, channel by channel."""

    part: Units
    positions: int | None = None

    @property
    def size(self) -> int | None:  # type: ignore[override]
        return None if self.positions is None or self.part.size is None else self.positions * self.part.size

    def resolved(self, size: int) -> Units:
        channels = self.part.size
        if channels is None or size % channels or self.positions not in (None, size // channels):
            raise UnitsError(f"{size} entries read from {channels} flattened channels")
        return Flattened(self.part, size // channels)

    def usage(self, masks: Mapping[str, Tensor], always: float = 1) -> Tensor:
        if self.positions is None:
            raise UnitsError("the number of flattened positions is not known")
        return self.part.usage(masks, always).repeat_interleave(self.positions, dim=-1)
