"""Importance of each unit for a task, as an alternative to its binary mask: ``AdaHATRule(importance=…)``."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.task_faults import input_of
from avalanche_amnesia.unit_graph.backbones import evaluation_mode
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.masking import LayerMasks
from avalanche_amnesia.unit_graph.values import ALWAYS

BATCH = 64
"""Samples per forward pass."""


def input_gradient(model: MaskedModel, task: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over mini-batches of ``Σ_j |∂loss/∂w_ij|``, over the weights ``w_ij`` that feed unit ``i``.

    Args:
        model: model that has just finished the task.
        task: label of the task.
        x: inputs of the task's samples, ``(n, …)``.
        y: labels of these samples, ``(n,)``.

    Returns:
        ``(n_units,)``, at least 0.
    """
    between = {name for name, factors in model.graph.factors.items() if len(factors) > 1}
    weights = {name: p for name, p in model.backbone.named_parameters() if name in between and p.requires_grad}
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with evaluation_mode(model), torch.enable_grad():
        for part, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            logits = model(input_of(model, part), task)
            loss = cross_entropy(logits, labels.to(logits.device))
            grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for total, grad in zip(sums.values(), grads, strict=True):
                if grad is not None:
                    total += grad.abs()
    return _by_unit(model.graph, sums)


def output_contribution(model: MaskedModel, task: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the root of the sum over samples of ``‖∂features/∂a_i‖²``: the effect of gate ``i`` on the features.

    Each feature of each sample is multiplied by a random sign, so that a mini-batch needs only one backward pass: the
    products of different signs have mean 0, and only the squares remain.

    Arguments and result: as for :func:`input_gradient`.
    """
    draw = torch.Generator().manual_seed(derive_seed(0, "output contribution", task))
    total = torch.zeros(model.n_units)
    mask, parts = model.binary_mask(task).float(), model.task_parts(task)
    with evaluation_mode(model), torch.enable_grad():
        for part in x.split(BATCH):
            gates = {name: gate.detach().requires_grad_() for name, gate in model.by_layer(mask).items()}
            features = model.backbone(input_of(model, part), parts, LayerMasks(gates))
            signs = torch.randint(2, features.shape, generator=draw).to(features) * 2 - 1
            grads = torch.autograd.grad((signs * features).sum(), list(gates.values()), materialize_grads=True)
            total += torch.cat(grads).square().cpu()
    return total.sqrt()


def _by_unit(graph: UnitGraph, values: Mapping[str, Tensor]) -> Tensor:
    """Sum the entries of ``values`` (parameter name → tensor) by the unit that they feed; return ``(n_units,)``."""
    total = torch.zeros(graph.sets.n_units)
    for name, value in values.items():
        units = graph.factors[name][0]
        if bool((units == ALWAYS).all()):
            continue
        sums = value.sum_to_size(units.shape).reshape(-1).cpu()
        for number, share in zip(units.reshape(-1).tolist(), sums, strict=True):
            total[list(graph.sets.members(number))] += share
    return total
