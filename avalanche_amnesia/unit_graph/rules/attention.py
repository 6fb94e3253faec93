"""Attention: weighted means of values over positions, channel by channel of every head."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from avalanche_amnesia.unit_graph.registry import rule
from avalanche_amnesia.unit_graph.rules.arithmetic import adopt
from avalanche_amnesia.unit_graph.units import ALWAYS
from avalanche_amnesia.unit_graph.values import Masked, ParameterValue, Value
from avalanche_amnesia.unit_graph.walk import Walk

A: Any = torch.ops.aten


@rule(A.scaled_dot_product_attention)
def attended(
    walk: Walk, node: fx.Node, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any
) -> Any:
    """Attention: zero where the values' unit is masked, whatever the weights are; these count as always in use."""
    for learned in (query, key, attn_mask):
        if isinstance(learned, ParameterValue):  # behind weights that all tasks read: only the first task trains it
            adopt(walk, learned, torch.full((1,) * len(learned.shape), ALWAYS).expand(learned.shape))
    if not isinstance(value, Value) or value.masked is not Masked.ZERO:
        return walk.conservative(node)
    # Queries and keys may hold constants where masked, but nothing that other tasks change.
    walk.zero_inputs(node, dirty_only=True)
    ids = walk.draft.sets.over(value.ids, [-2], keepdim=True)
    result = walk.result(node)
    heads = (*result.shape[:-2], 1, ids.shape[-1])
    if ids.dim() == 4 and ids.shape[1] != result.shape[1]:  # several heads of queries share one of keys and values
        ids = ids.repeat_interleave(result.shape[1] // ids.shape[1], 1)
    return Value(ids.expand(heads).expand(result.shape), value.dtype)
