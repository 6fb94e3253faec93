"""Results of linear layers that read samples themselves, kept while other layers' and their weights change."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avalanche_amnesia.unit_graph.masking import OpenEntries

MOST_KEPT = 2**28
"""Bytes that a layer's results may take."""


class _Kept(NamedTuple):
    """Two states of a layer's units ``(2, units, inputs + 1)``, and where their results are among those of all samples.

    The last of these ``(n, columns)`` is 0, for closed units.
    """

    states: Tensor
    columns: Tensor
    is_open: Tensor
    results: Tensor


class FirstLayers:
    """Computes linear layers that read samples; of units that have been met in two states only those in neither.

    Such a layer is most of a small network. Mostly one task wrote into a unit, whose weights then are as with all
    tasks or as with none, whichever of them go.

    Attributes:
        place: where the samples of the next forward are among all.
    """

    def __init__(self, samples: Tensor, entries: Mapping[str, OpenEntries]) -> None:
        self._rows, self._entries, self.place = samples.flatten(1), entries, slice(None)
        self._first: dict[str, Tensor] = {}
        self._kept: dict[str, _Kept | None] = {}
        self._columns: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Begin a pass; the first two are of the states to come, on any samples."""
        self._columns.clear()

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """What a layer makes of its input; None: it is not known, and has to be computed."""
        rows = self._rows[self.place]
        if (x.data_ptr(), x.shape, x.stride()) != (rows.data_ptr(), rows.shape, rows.stride()):
            return None
        if name not in self._columns:
            units = torch.cat([weight, (weight.new_zeros(len(weight)) if bias is None else bias)[:, None]], 1)
            self._columns[name] = self._columns_of(name, units)
        columns, kept = self._columns[name], self._kept.get(name)
        if columns is None or kept is None:
            return None
        result = kept.results[self.place].index_select(1, columns.clamp_min(0))
        others = (columns < 0).nonzero()[:, 0]
        if len(others):
            result.index_copy_(1, others, F.linear(x, weight[others], None if bias is None else bias[others]))
        return result

    def _columns_of(self, name: str, units: Tensor) -> Tensor | None:
        """Column of each unit among the results, -1 where it is in neither state; None: there are none."""
        if name not in self._first:
            self._first[name] = units
            return None
        if name not in self._kept:
            self._kept[name] = self._keep(self._first[name], units, self._entries.get(name))
        kept = self._kept[name]
        if kept is None:
            return None
        as_first, as_second = (kept.states == units).all(2) | ~kept.is_open
        return torch.where(as_first, kept.columns[0], torch.where(as_second, kept.columns[1], -1))

    def _keep(self, first: Tensor, second: Tensor, entries: OpenEntries | None) -> _Kept | None:
        rows = None if entries is None else entries.rows
        is_open = torch.full_like(first[:, 0], rows is None, dtype=torch.bool)
        if rows is not None:
            is_open[rows] = True
        differ = (first != second).any(1) & is_open
        computed = torch.cat([first[is_open], second[differ], first.new_zeros(1, first.shape[1])])
        if len(computed) * len(self._rows) * first.element_size() > MOST_KEPT:
            return None
        of_first = torch.where(is_open, is_open.cumsum(0) - 1, len(computed) - 1)
        of_second = torch.where(differ, is_open.sum() + differ.cumsum(0) - 1, of_first)
        results = F.linear(self._rows, computed[:, :-1], computed[:, -1])
        return _Kept(torch.stack([first, second]), torch.stack([of_first, of_second]), is_open, results)
