"""Ridge regression of a task's labels on random features of the inputs; its scores are added to the task's logits."""

from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, one_hot, relu

_RIDGE = 0.1
"""λ in units of the mean of the diagonal of ``Pᵀ P``: best of .1, .3, 1, 3, 10 on validation images of four streams."""


@lru_cache(maxsize=4)
def _projection(n_inputs: int, width: int, device: torch.device) -> Tensor:
    """Return the random matrix ``R (n_inputs, width)``, always the same one for these sizes."""
    # RandomState's stream never changes between numpy versions, so that saved states stay valid.
    drawn = np.random.RandomState(0).standard_normal((n_inputs, width))
    return torch.from_numpy(drawn / n_inputs**0.5).float().to(device)


def random_features(x: Tensor, width: int) -> Tensor:
    """Return random features ``ReLU(z R)``, ``(batch, width)``: layer-normalised inputs ``z``, fixed random ``R``."""
    rows = x.flatten(1).float()
    return relu(layer_norm(rows, rows.shape[1:]) @ _projection(prod(x.shape[1:]), width, x.device))


def fitted_ridge(features: Tensor, labels: Tensor, n_classes: int, scale: float) -> Tensor:
    """Fit a ridge regression; return ``scale`` × weights and (last column) bias, float16 ``(n_classes, width + 1)``.

    ``W = (Pᵀ P + λ I)⁻¹ Pᵀ Y`` of features ``P (n, width)`` and one-hot labels ``Y``, both centred, or the equal
    ``Pᵀ (P Pᵀ + λ I)⁻¹ Y`` if there are fewer samples than features. Not finite if features are not, or if float16
    overflows because they vary too little.
    """
    wanted = one_hot(labels, n_classes).to(features)
    mean, mean_wanted = features.mean(0), wanted.mean(0)
    rows, wanted = features - mean, wanted - mean_wanted
    few = len(rows) < rows.shape[1]
    gram = rows @ rows.T if few else rows.T @ rows
    gram.diagonal().add_(_RIDGE * rows.square().sum() / rows.shape[1] + torch.finfo(rows.dtype).tiny)
    factor, _ = torch.linalg.cholesky_ex(gram)
    weight = rows.T @ torch.cholesky_solve(wanted, factor) if few else torch.cholesky_solve(rows.T @ wanted, factor)
    return (scale * torch.cat([weight.T, (mean_wanted - mean @ weight)[:, None]], 1)).half()


def ridge_scores(x: Tensor, ridge: Tensor) -> Tensor:
    """Return class scores ``(batch, classes)`` of inputs ``x``, with the weights ``ridge`` of :func:`fitted_ridge`."""
    weight, bias = ridge[:, :-1].float(), ridge[:, -1].float()
    return random_features(x, weight.shape[1]) @ weight.T + bias
