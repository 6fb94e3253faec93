"""A masked model in words: its layers, what feeds them, which rule covers its parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from avalanche_amnesia.text_table import text_table
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.units import ALWAYS


class Description:
    """Printed, it is a table; its attributes are what the table says."""

    def __init__(self, backbone: nn.Module, graph: UnitGraph, *, tried: bool) -> None:
        names = list(graph.layers)
        sizes = {name: parameter.numel() for name, parameter in backbone.named_parameters()}
        total = sum(sizes.values()) or 1
        covered = dict.fromkeys(range(len(names)), 0)
        first = graph.frozen | {
            name for name, factors in graph.factors.items() if all(bool((f == ALWAYS).all()) for f in factors)
        }
        for parameter in graph.factors:
            if parameter not in first:
                covered[graph.layer_of(parameter)] += sizes.get(parameter, 0)
        self.rows = [
            (name, layer.kind, layer.units, _sources(graph, name), covered[i])
            for i, (name, layer) in enumerate(graph.layers.items())
        ]
        masked = sum(sizes.get(name, 0) for name in graph.factors if name not in first)
        frozen = sum(sizes.get(name, 0) for name in first)
        owned = sum(sizes.get(name, 0) for name in graph.owned)
        self.shares = {"masked": masked / total, "per task": owned / total, "first task only": frozen / total}
        self.features, self.parameters, self.input_shape = len(graph.output), total, graph.input_shape
        self.tried = tried

    def __str__(self) -> str:
        head = ("layer", "kind", "units", "fed by", "parameters")
        rows = [
            (name, kind, str(units), _shortened(sources), f"{parameters:,}")
            for name, kind, units, sources, parameters in self.rows
        ]
        shares = ", ".join(f"{rule} {share:.1%}" for rule, share in self.shares.items() if share)
        last = (
            f"{sum(row[2] for row in self.rows):,} units in {len(self.rows)} layers; {self.features} features; "
            f"{self.parameters:,} parameters: {shares}; traced on inputs of shape {self.input_shape}; "
            + ("tried out in both modes" if self.tried else "not tried out (trial=False)")
        )
        return f"{text_table(head, rows)}\n{last}\n"

    __repr__ = __str__


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _sources(graph: UnitGraph, layer: str) -> tuple[str, ...]:
    """Names of the layers whose units feed a layer, in their order; ``input`` first."""
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
