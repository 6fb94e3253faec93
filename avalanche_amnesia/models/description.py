"""Tables about a masked model: its layers, their inputs, the rules for its parameters, and the units in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from avalanche_amnesia.text_table import text_table
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.values import ALWAYS

if TYPE_CHECKING:
    from avalanche_amnesia.models.masked import MaskedModel

ALL_LAYERS = "all"
"""Name of the last row of the table of :func:`utilisation`, for all layers together."""


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
            covered[graph.layer_of(parameter)] += sizes.get(parameter, 0)
        self.rows = [
            (name, layer.kind, layer.units, _sources(graph, name), covered[i])
            for i, (name, layer) in enumerate(graph.layers.items())
        ]
        frozen, owned = (sum(sizes.get(name, 0) for name in names) for names in (first, graph.owned))
        counts = {"masked": covered.total(), "per task": owned, "first task only": frozen}
        counts["without gradients"] = sum(sizes.values()) - sum(counts.values())
        self.shares = {rule: count / total for rule, count in counts.items()}
        self.features, self.parameters, self.input_shape = len(graph.output), total, graph.input_shape
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
    """Return the names of the layers that ``layer`` gets input from, in order; ``input`` (of the network) is first."""
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


def utilisation(model: MaskedModel, *, counts: bool = False) -> dict[str, dict[int | str, float]]:
    """Return layer → column → fraction (with ``counts``: number) of the layer's units in each remaining task's mask.

    >>> import torch
    >>> from avalanche_amnesia.models import MLP, MaskedModel
    >>> model = MaskedModel(MLP(4, hidden=(2,), features=4))
    >>> for task, embedding in enumerate(([1, -1, 1, 1, -1, -1], [1, -1, 1, -1, -1, 1])):
    ...     _ = model.start_task(task, torch.tensor(embedding).float())
    ...     model.finish_task()
    >>> [row["any"] for row in utilisation(model).values()]
    [0.5, 0.75, 0.6666666666666666]
    >>> utilisation(model, counts=True)["all"]
    {0: 3, 1: 3, 'any': 4, 'units': 6}

    Reference: the share of active mask entries by layer and task, Duan, HAT-CL, 2023.
    """
    units = {name: layer.units for name, layer in model.graph.layers.items()}
    if ALL_LAYERS in units:
        raise ValueError(
            f"a layer of the model is called {ALL_LAYERS!r}, which is the name of the table's last row: rename it"
        )
    in_use = model.by_layer(model.cumulative_mask())
    columns: dict[int | str, Mapping[str, Tensor]] = {**dict(model.masks.items()), "any": in_use}
    table: dict[str, dict[int | str, float]] = {
        name: {**{column: int(mask[name].sum()) for column, mask in columns.items()}, "units": n}
        for name, n in units.items()
    }
    table[ALL_LAYERS] = {column: sum(row[column] for row in table.values()) for column in (*columns, "units")}
    if counts:
        return table
    return {
        name: {column: n if column == "units" else n / row["units"] for column, n in row.items()}
        for name, row in table.items()
    }
