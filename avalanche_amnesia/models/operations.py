"""The catalogue: what each layer and operation of torch does to a masked unit. Anything else is refused."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# f(0) = 0 entry by entry: a masked unit stays zero.
ZERO_KEEPING_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Hardswish, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
# A window over positions sees one channel alone: a masked channel stays zero. On flattened units it would mix them.
POOLING_MODULES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
ZERO_KEEPING_FUNCTIONS: set[Any] = {
    *(F.relu, F.relu_, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.tanh),
    *(F.hardswish, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, torch.relu, torch.tanh),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
}
POOLING_FUNCTIONS: set[Any] = {
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d),
}
ZERO_KEEPING_METHODS = {"relu", "relu_", "tanh", "tanh_", "contiguous", "clone", "float", "double"}
# f(0) ≠ 0 entry by entry: allowed, and the mask is multiplied in once more behind it.
LIFTING_MODULES = (nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.LogSigmoid, nn.AlphaDropout, nn.Hardtanh)
LIFTING_FUNCTIONS: set[Any] = {F.sigmoid, torch.sigmoid, F.hardsigmoid, F.softplus, F.logsigmoid, F.hardtanh}
LIFTING_METHODS = {"sigmoid", "sigmoid_"}
ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub}
ADDITION_METHODS = {"add", "add_", "sub", "sub_"}
SCALINGS: set[Any] = {operator.mul, operator.imul, operator.truediv, operator.itruediv, torch.mul, torch.div}
SCALING_METHODS = {"mul", "mul_", "div", "div_"}
SHAPE_METHODS = {"size", "dim"}
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
