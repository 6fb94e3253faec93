"""Networks in which the value of a masked unit, or an entry outside a mask, finds a way around the masks.

Each network must be refused, or protected to the bit: see test_leaking_networks.py. ``kit.NETWORKS`` is the table:
name → (factory, shape of one input, further options of MaskedModel). Networks added by ``accepts`` must be accepted:
torch.export splits each of them into operations, except batch norm without momentum in training mode. Networks added
by ``either`` may be refused.
"""

from support.leaking_networks import functions, layers, state  # noqa: F401 - they fill the table
