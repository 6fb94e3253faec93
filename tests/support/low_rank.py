"""Low-rank updates and adapters written by hand, beside layers without gradients."""

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """A layer without gradients, and its low-rank update: no zeros, which would hide what it reads."""

    def __init__(self, base: nn.Linear, rank: int = 6, *, bias: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)) + self.base(x)


class RankNet(nn.Sequential):
    """Low-rank updates, an adapter with biases, and a LayerNorm without gradients; 6 ranks each."""

    features = 12

    def __init__(self) -> None:
        norm = nn.LayerNorm(20).requires_grad_(False)
        super().__init__(
            *(nn.Flatten(), LowRank(nn.Linear(64, 20)), norm, nn.ReLU()),
            *(Adapter(20), LowRank(nn.Linear(20, self.features), bias=True)),
        )


class Adapter(nn.Module):
    """A bottleneck with biases, added to what it reads (Houlsby et al., ICML 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.relu(self.down(x)))
