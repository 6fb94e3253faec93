"""The nodes of a backbone's graph that put a task's masks together, for whatever a set of units stands behind."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from avalanche_amnesia.unit_graph.draft import Draft
from avalanche_amnesia.unit_graph.masking import use_of_sets
from avalanche_amnesia.unit_graph.units import ALWAYS, compact


class MaskNodes:
    """Masks as nodes, each made once.

    They depend on no other value: they all stand at the beginning of the graph, where every node can read them.

    Args:
        graph: receives them.
        draft: names the layers and their sets; receives the indices of sets that are no whole layers.
        behind: the node of the graph that they stand behind; that of the masks by layer comes next to it.
    """

    def __init__(self, graph: fx.Graph, draft: Draft, behind: fx.Node) -> None:
        self.graph, self.draft = graph, draft
        with graph.inserting_after(behind):
            self.masks = graph.placeholder("masks")
        with graph.inserting_after(self.masks):
            self._end = graph.call_function(dict)  # marks a place; taken out again as nobody reads it
        self._emitted: dict[object, fx.Node] = {}

    def emit(self, ids: Tensor) -> fx.Node | None:
        """A node with the mask that the sets make, cut to size 1 where it is constant; None where nothing is masked."""
        small = compact(ids)
        while small.dim() > 1 and small.shape[0] == 1:
            small = small[0]
        if bool((small == ALWAYS).all()):
            return None
        key = (tuple(small.shape), tuple(small.reshape(-1).tolist()))
        if key not in self._emitted:
            with self.graph.inserting_before(self._end):
                vector = self._emit_vector(small.reshape(-1))
                if small.dim() > 1:
                    vector = self.graph.call_method("reshape", (vector, tuple(small.shape)))
            self._emitted[key] = vector
        return self._emitted[key]

    def _emit_vector(self, ids: Tensor) -> fx.Node:
        call = self.graph.call_function
        rows = [self.draft.sets.members(number) for number in ids.tolist()]
        width = len(rows[0])
        if width and all(len(row) == width for row in rows):
            parts = [self._whole_layers([row[place] for row in rows]) for place in range(width)]
            if all(part is not None for part in parts):
                nodes = [
                    call(operator.getitem, (self.masks, part[0]))
                    if len(part) == 1
                    else call(torch.cat, ([call(operator.getitem, (self.masks, name)) for name in part],))
                    for part in parts
                    if part is not None
                ]
                while len(nodes) > 1:
                    nodes = [call(torch.maximum, (nodes[0], nodes[1])), *nodes[2:]]
                return nodes[0]
        units = self.draft.sets.n_units
        fill = {ALWAYS: [units]}
        filled = [row or fill.get(number, [units + 1]) for row, number in zip(rows, ids.tolist(), strict=True)]
        width = max(map(len, filled))
        name = f"_sets_{len(self.draft.indices)}"
        self.draft.indices[name] = torch.tensor([row + row[:1] * (width - len(row)) for row in filled]).T.contiguous()
        layers = [call(operator.getitem, (self.masks, layer)) for layer in self.draft.layers]
        return call(use_of_sets, (layers, self.graph.get_attr(name)))

    def _whole_layers(self, units: Sequence[int]) -> list[str] | None:
        """Names of the layers whose units these are, one after the other; None where they are none."""
        result, at = [], 0
        starts = {int(self.draft.sets.members(int(layer.sets[0]))[0]): layer for layer in self.draft.layers.values()}
        while at < len(units):
            layer = starts.get(units[at])
            if layer is None or list(units[at : at + layer.units]) != list(range(units[at], units[at] + layer.units)):
                return None
            result.append(layer.name)
            at += layer.units
        return result
