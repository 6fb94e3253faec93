"""A plain multilayer perceptron as a feature extractor."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks


class MLP(nn.Module):
    """Fully connected ReLU layers from a flattened input to non-negative features.

    Args:
        in_features: entries of one flattened input.
        hidden: units of the hidden layers, in order; one number: of a single hidden layer.
        features: units of the last layer, the width of what the heads read.
        dropout: probability behind every layer, or a pair (of the input, behind every layer) as in the HAT paper's
            (0.2, 0.5). In ``[0, 1)``.

    Raises:
        ValueError: for a width below 1 or a probability outside ``[0, 1)``.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden: Sequence[int] | int = (256, 100),
        features: int = 64,
        dropout: float | tuple[float, float] = 0.0,
    ) -> None:
        super().__init__()
        given = hidden if isinstance(hidden, Iterable) else [hidden]
        widths = (
            checks.whole_number("in_features", in_features),
            *(checks.whole_number("a width in hidden", width) for width in given),
            checks.whole_number("features", features),
        )
        of_input, of_layers = dropout if isinstance(dropout, (tuple, list)) else (0.0, dropout)
        if not (0 <= of_input < 1 and 0 <= of_layers < 1):
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        self.in_features, self.features = widths[0], widths[-1]
        self.input_dropout = nn.Dropout(of_input)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(of_layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch: ``(batch, …)`` → ``(batch, features)``."""
        x = self.input_dropout(torch.flatten(x, 1))
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return x
