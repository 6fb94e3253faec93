"""Networks of every kind in pools: the state is that of a model that never saw the others."""

import pytest
import torch
import torch.nn.functional as F
from support.isolated_pools import NETS, equal, pools, references
from support.small_networks import Net
from support.strategies import DIGITS, learn
from support.strategy_state import bits
from torch import Tensor, nn

from avalanche_amnesia.isolation import CapacityError
from avalanche_amnesia.trajectory import Trajectory


class ResidualNet(nn.Module):
    """A small ResNet with BatchNorm, global pooling and a shortcut that changes the width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.first_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12)
        self.shortcut, self.shortcut_norm = nn.Conv2d(8, 12, 1, stride=2, bias=False), nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.first_norm(self.first(x)))
        x = torch.relu(self.shortcut_norm(self.shortcut(x)) + self.second_norm(self.second(x)))
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


class Heads(nn.Module):
    """Two heads of attention over the rows of an image: a third of the units is no whole number of heads."""

    features = 16

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        return self.attend(x, x, x, need_weights=False)[0].mean(1)


def of_maps(forward, **parts):
    return Net(lambda net, x: forward(net, x).mean((2, 3)), features=12, conv=nn.Conv2d(1, 12, 3), **parts)


MORE = {
    "resnet": ResidualNet,
    "heads": Heads,
    # Every channel is divided by what its neighbours are, on either side of a slot's border.
    "neighbours": lambda: of_maps(lambda net, x: net.norm(torch.relu(net.conv(x))), norm=nn.LocalResponseNorm(3)),
    # Two groups of channels are normalised together.
    "group norm": lambda: of_maps(lambda net, x: torch.relu(net.norm(net.conv(x))), norm=nn.GroupNorm(2, 12)),
    "grouped": lambda: of_maps(
        lambda net, x: torch.relu(net.grouped(torch.relu(net.conv(x)))), grouped=nn.Conv2d(12, 12, 3, groups=2)
    ),
    # Every channel has a shift that no task trains.
    "positions": lambda: of_maps(
        lambda net, x: torch.relu(net.conv(x) + net.shift),
        shift=nn.Buffer(torch.linspace(0, 1, 12).reshape(1, 12, 1, 1)),
    ),
}


@pytest.mark.parametrize("net", MORE)
def test_pools_hold_whatever_lies_across_their_borders(net, monkeypatch):
    monkeypatch.setitem(NETS, net, MORE[net])
    strategy, refs = pools(net, slots=3), references(net=net, slots=3)
    learn(strategy, DIGITS.train_stream[:3])
    assert strategy.unlearn([1]).claim == "exact"
    with pytest.raises(CapacityError, match=r"task 3 .*slot \[0\] of 3.* by tasks \[0\]"):
        strategy.train(DIGITS.train_stream[3])
    strategy.train(DIGITS.train_stream[4])
    assert equal(strategy, refs)


def test_a_task_that_can_not_be_recorded_gives_its_slot_back(monkeypatch):
    strategy, refs = pools(slots=3), references(slots=3)
    learn(strategy, DIGITS.train_stream[:2])
    before = bits(strategy.model)

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Trajectory, "record", full_disk)
        with pytest.raises(OSError, match="no space"):
            strategy.train(DIGITS.train_stream[2])
    assert bits(strategy.model) == before
    strategy.abort_training()
    assert bits(strategy.model) == before
    strategy.train(DIGITS.train_stream[2])
    assert strategy.unlearn([0]).claim == "exact"
    assert equal(strategy, refs)
