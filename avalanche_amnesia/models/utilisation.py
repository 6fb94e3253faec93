"""Share of every layer that each task uses, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from avalanche_amnesia.models.masked import MaskedModel

ALL_LAYERS = "all"
"""Row of a utilisation table that takes all layers together."""


def utilisation(model: MaskedModel, *, counts: bool = False) -> dict[str, dict[int | str, float]]:
    """Units that each remaining task's mask opens, layer by layer.

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
    remaining = model.masks
    in_use = {
        name: torch.stack([torch.zeros(n, dtype=torch.bool), *(mask[name].cpu() for mask in remaining.values())]).any(0)
        for name, n in units.items()
    }
    columns: dict[int | str, Mapping[str, Tensor]] = {**dict(remaining.items()), "any": in_use}
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
