"""Multilayer perceptron as a feature extractor."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from avalanche_amnesia import checks

HiddenNorm = Literal["none", "batch", "layer"]
_NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class MLP(nn.Module):
    """Fully connected network from flattened inputs to features; each layer: linear, norm, activation, dropout.

    Args:
        in_features: number of entries of one flattened input.
        hidden: number of units of each hidden layer, in order; an int for a single hidden layer.
        features: number of units of the last layer, the heads' input width.
        dropout: probability after every layer, or a pair (of the input, after every layer) such as the HAT paper's
            (0.2, 0.5). In ``[0, 1)``.
        activation: a module class or a function that returns a module, called once per layer without arguments:
            ``nn.Tanh``, ``lambda: nn.LeakyReLU(0.2)``. In a masked model, a closed unit's value is 0 after the
            activation, even if the activation maps 0 to another value. A layer's units share an activation's weight
            (``nn.PReLU``): a ``MaskedModel`` freezes it after the first task, and a ``SubnetModel`` refuses it.
        bias: whether the linear layers have biases.
        norm: norm after every linear layer: ``none``, ``batch`` (BatchNorm1d) or ``layer`` (LayerNorm). In a masked
            model, each task has its own norms, over the units in its mask.

    Raises:
        ValueError: for a width below 1, a probability outside ``[0, 1)`` or an unknown norm.
        TypeError: if ``activation`` does not return a module, or is itself a module.
    """

    def __init__(
        self,
        in_features: int,
        *,
        hidden: Sequence[int] | int = (256, 100),
        features: int = 64,
        dropout: float | tuple[float, float] = 0.0,
        activation: Callable[[], nn.Module] = nn.ReLU,
        bias: bool = True,
        norm: HiddenNorm = "none",
    ) -> None:
        super().__init__()
        given = hidden if isinstance(hidden, Iterable) else [hidden]
        widths = (
            checks.whole_number("in_features", in_features),
            *(checks.whole_number("a width in hidden", width) for width in given),
            checks.whole_number("features", features),
        )
        of_input, of_layers = dropout if isinstance(dropout, (tuple, list)) else (0.0, dropout)
        checks.within("dropout", of_input, "[0, 1)")
        checks.within("dropout", of_layers, "[0, 1)")
        checks.one_of("norm", norm, HiddenNorm)
        if isinstance(activation, nn.Module) or not callable(activation):
            raise TypeError(f"activation must be a class of modules (nn.Tanh), or a function, got {activation!r}")
        self.in_features, self.features = widths[0], widths[-1]
        self.input_dropout = nn.Dropout(of_input)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.Identity() if norm == "none" else _NORMS[norm](width) for width in widths[1:])
        self.activations = nn.ModuleList(activation() for _ in self.layers)
        self.dropout = nn.Dropout(of_layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features ``(batch, features)`` of a batch ``(batch, …)``."""
        x = self.input_dropout(torch.flatten(x, 1))
        for layer, norm, activation in zip(self.layers, self.norms, self.activations, strict=True):
            x = self.dropout(activation(norm(layer(x))))
        return x
