"""Strategies with weight pools, and the reference models that they must equal."""

from functools import partial

from avalanche_amnesia import MLP, DisjointSubnets, Pools, References
from support.strategies import DIGITS, ConvNet, NormedConvNet, make, mlp
from support.strategy_state import hashes, unlearning_plugin

N_TASKS, ITERATIONS = 5, 4  # of one task: 80 digits, batches of 40, two epochs
NETS = {
    "mlp": mlp,
    "dropout": lambda: MLP(64, hidden=(12, 9), features=11, dropout=0.2),
    "conv": ConvNet,
    "norms": partial(NormedConvNet, dropout=0.3),
}


def pools(net="mlp", *, slots=None, **options):
    return make(DisjointSubnets, net=NETS[net], isolation=Pools(slots), **options)


def references(benchmark=DIGITS, **options):
    return References(lambda **kwargs: pools(**options, **kwargs), benchmark)


def equal(strategy, refs: References) -> bool:
    """Return True if every tensor equals the reference's to the bit, and tasks have the same order."""
    return hashes(strategy.model) == hashes(refs.reference(unlearning_plugin(strategy).ledger.remaining))
