"""Strategies with weight pools, and the reference models that they must equal."""

import torch
from torch import Tensor, nn

from avalanche_amnesia import MLP, DisjointSubnets, Pools, References
from support.strategies import DIGITS, ConvNet, make
from support.strategy_state import bits, unlearning_plugin

N_TASKS, ITERATIONS = 5, 4  # of one task: 80 digits, batches of 40, two epochs


class NormNet(nn.Module):
    """Convolutions with BatchNorm and dropout."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.drop = nn.Conv2d(6, 10, 3, stride=2), nn.Dropout(0.3)
        self.third = nn.Linear(10 * 9, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(self.third(self.drop(torch.flatten(x, 1))))


NETS = {
    "mlp": lambda: MLP(64, hidden=(24,), features=16),
    "dropout": lambda: MLP(64, hidden=(12, 9), features=11, dropout=0.2),
    "conv": ConvNet,
    "norms": NormNet,
}


def pools(net="mlp", *, slots=None, **options):
    return make(DisjointSubnets, net=NETS[net], isolation=Pools(slots), **options)


def references(benchmark=DIGITS, **options):
    return References(lambda **kwargs: pools(**options, **kwargs), benchmark)


def equal(strategy, refs: References) -> bool:
    """Return True if every tensor equals the reference's to the bit, and tasks have the same order."""
    reference = refs.reference(unlearning_plugin(strategy).ledger.remaining)
    ours, theirs = strategy.model.state_dict(), reference.state_dict()
    same = ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert same == (bits(strategy.model) == bits(reference))
    return same
