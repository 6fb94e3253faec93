"""Networks in which a masked unit's value, or an entry outside a mask, finds a way around the masks.

Each is to be refused, or to be protected to the bit: see test_leaking_networks.py. ``NETWORKS`` has them all, name →
(factory, shape of one input, further options of MaskedModel). Those entered by ``accepts`` must go in: torch.export
takes every one of them apart into operations, but for the batch norm without momentum in training mode, or they have
always gone in. Those entered by ``either`` may be refused.
"""

from support.leaking_networks import (
    changed_places,
    computed_weights,
    constants,
    control_flow,
    functions_and_attention,
    in_place,
    kept_state,
    masked_zeros,
    shared_modules,
    unexpected_forwards,
)
from support.leaking_networks.kit import ACCEPTED, FLAT, IMAGE, NETWORKS, TOKENS, VARYING, WORDS, K, Net, P, part

__all__ = [
    "ACCEPTED",
    "FLAT",
    "IMAGE",
    "NETWORKS",
    "TOKENS",
    "VARYING",
    "WORDS",
    "K",
    "Net",
    "P",
    "changed_places",
    "computed_weights",
    "constants",
    "control_flow",
    "functions_and_attention",
    "in_place",
    "kept_state",
    "masked_zeros",
    "part",
    "shared_modules",
    "unexpected_forwards",
]
