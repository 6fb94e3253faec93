"""Table about a masked model: its layers, their inputs, and the rules for its parameters."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn

from avalanche_amnesia.text_table import text_table
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.values import ALWAYS


class Description:
    """Printable table of a masked model's layers and parameters; the attributes are the table's values."""

    def __init__(self, backbone: nn.Module, graph: UnitGraph, *, tried: bool) -> None:
        sizes = {name: parameter.numel() for name, parameter in backbone.named_parameters()}
        total = sum(sizes.values()) or 1
        first = graph.frozen | {
            name for name, factors in graph.factors.items() if all(bool((f == ALWAYS).all()) for f in factors)
        }
        covered = Counter[int]()
        for parameter in graph.factors.keys() - first:
            covered[graph.layer_index(parameter)] += sizes.get(parameter, 0)
        self.rows = [
            (name, layer.kind, layer.units, _sources(graph, name), covered[i])
            for i, (name, layer) in enumerate(graph.layers.items())
        ]
        frozen, owned = (sum(sizes.get(name, 0) for name in names) for names in (first, graph.owned))
        counts = {"masked": covered.total(), "per task": owned, "first task only": frozen}
        counts["without gradients"] = sum(sizes.values()) - sum(counts.values())
        self.shares = {rule: count / total for rule, count in counts.items()}
        self.features, self.parameters, self.input_shape = len(graph.output), total, graph.inputs.shape
        self.tried = tried

    def __str__(self) -> str:
        head = ("layer", "kind", "units", "fed by", "parameters")
        rows = [
            (name, kind, str(units), ", ".join(sources[:3]) + more, f"{parameters:,}")
            for name, kind, units, sources, parameters in self.rows
            for more in [f" and {len(sources) - 3} more" if len(sources) > 3 else ""]
        ]
        shares = ", ".join(f"{rule} {share:.1%}" for rule, share in self.shares.items() if share)
        last = (
            f"{sum(row[2] for row in self.rows):,} units in {len(self.rows)} layers; {self.features} features; "
            f"{self.parameters:,} parameters: {shares}; traced on inputs of shape {self.input_shape}; "
            + ("tried out in both modes" if self.tried else "not tried out (trial=False)")
        )
        return f"{text_table(head, rows)}\n{last}\n"

    __repr__ = __str__


def _sources(graph: UnitGraph, layer: str) -> tuple[str, ...]:
    """Return the names of the layers whose units ``layer`` reads, with ``input`` if it reads values without a mask."""
    sets: Tensor | None = graph.sources(layer)
    if sets is None:
        return ("input",)
    numbers = sets.unique().tolist()
    units = {unit for number in numbers for unit in graph.sets.members(number)}
    names, start = [], 0
    for name, of_layer in graph.layers.items():
        if any(start <= unit < start + of_layer.units for unit in units):
            names.append(name)
        start += of_layer.units
    return (*(["input"] if ALWAYS in numbers else []), *names)
