"""Test of a masked backbone: changing every entry outside a mask must not change one bit of the features.

The rules determine the entries that a mask must protect. This test checks them on the network: it runs a random
mask before and after all entries outside the mask are replaced, in training and in evaluation mode.
"""

import copy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.unit_graph.backbones import first_float, preserve_random_state, preserve_state
from avalanche_amnesia.unit_graph.exporting import features_of
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.masked_backbone import MaskedBackbone
from avalanche_amnesia.unit_graph.task_owned import OwnModules

_SAMPLES = 4
_LARGE = 1 << 16
"""Numbers per sample above which two samples suffice: a norm then has enough positions in each."""
_CLOSE = 1e-3
_FEW = 1_000_000
Tensors = dict[str, Tensor]


@torch.no_grad()
def check_masks(module: MaskedBackbone, graph: UnitGraph) -> None:
    """Raise ModelError if weights outside a random mask influence the features, in training or evaluation mode."""
    draw = torch.Generator().manual_seed(0)
    like = first_float(module)
    mode = module.training
    held = {n: p for n, p in module.named_parameters() if p.is_floating_point() and p.requires_grad}
    start = {name: _add_noise(value, draw) for name, value in held.items()}
    own = module.fresh_parts()
    for name, value in (*own.named_parameters(), *own.named_buffers()):
        if value.is_floating_point():
            value.copy_(_add_noise(value, draw).abs() if name.endswith("var") else _add_noise(value, draw))
    rounds = 2 if sum(value.numel() for value in start.values()) < _FEW else 1
    x = graph.inputs.batch(_n_samples(graph), draw, like)
    try:
        for training in (True, False) * rounds:
            module.train(training)
            masks = {name: _random_mask(layer.units, draw, like.device) for name, layer in graph.layers.items()}
            moved = _change_outside(start, graph, masks, draw)
            before, after = (_features(module, parameters, own, x, masks) for parameters in (start, moved))
            if not bool(same_bits(before, after).all()):
                alone = ((name, {**start, name: moved[name]}) for name in start)
                leak = next((n for n, p in alone if not torch.equal(before, _features(module, p, own, x, masks))), "")
                raise ModelError(
                    f"in {'training' if training else 'evaluation'} mode a task reads {leak or 'several parameters'!r} "
                    "outside of its mask. Please report it; meanwhile declare that module frozen=[…] or task_owned=[…]"
                )
    finally:
        module.train(mode)


@torch.no_grad()
def compare(backbone: nn.Module, module: MaskedBackbone, graph: UnitGraph) -> None:
    """Raise ModelError if a backbone and its masked form return different features although all masks are 1."""
    like = first_float(module)
    x = graph.inputs.batch(_n_samples(graph), None, like)
    open_masks = {name: torch.ones(layer.units, device=like.device) for name, layer in graph.layers.items()}
    with preserve_state(module):
        module.eval()
        try:
            masked = _features(module, {}, module.fresh_parts(), x, open_masks)
        except ModelError as error:  # a size error: the graph was traced for two samples, and this number differs
            raise ModelError(f"forward of {type(backbone).__name__}: {error}") from error
    with preserve_state(backbone):
        torch.manual_seed(0)
        plain = features_of(backbone.eval(), graph.inputs, graph.inputs.tensors(x))
    largest = float(plain.abs().nan_to_num().amax().clamp_min(1e-6)) if plain.numel() else 1.0
    if plain.shape != masked.shape or not torch.allclose(plain, masked, _CLOSE, _CLOSE * largest, equal_nan=True):
        raise ModelError(
            f"what torch.export made of {type(backbone).__name__} computes something else than its forward: take out "
            "of it what differs from call to call (Python's own random numbers, counters, global state)"
        )


def _n_samples(graph: UnitGraph) -> int:
    return 2 if max(map(prod, graph.inputs.shapes)) >= _LARGE else _SAMPLES


def _features(module: MaskedBackbone, parameters: Tensors, own: OwnModules, x: Any, masks: Tensors) -> Tensor:
    """Return the features for ``parameters``, with equal random numbers at every call and without side effects."""
    with preserve_random_state(module):
        torch.manual_seed(0)
        fresh = copy.deepcopy(own).train(module.training)
        return functional_call(module, parameters, (x, fresh, masks), tie_weights=False)


def _add_noise(value: Tensor, draw: torch.Generator) -> Tensor:
    """Return ``value`` plus noise, because the test can't detect inputs that are multiplied by a zero weight."""
    noise = _noise(value, draw)
    return value.detach() * (1 + 0.2 * noise) + 0.02 * noise.roll(1)


def _noise(like: Tensor, draw: torch.Generator) -> Tensor:
    """Return normal noise in the shape of ``like``; large tensors repeat 65536 numbers."""
    count = like.numel()
    few = torch.randn(min(count, 1 << 16), generator=draw).to(like)
    return few.repeat(-(-count // max(1, len(few))))[:count].view(like.shape)


def _random_mask(units: int, draw: torch.Generator, device: torch.device) -> Tensor:
    mask = (torch.rand(units, generator=draw) < 0.5).float()
    mask[int(torch.randint(units, (), generator=draw))] = 1.0
    return mask.to(device)


def _change_outside(start: Tensors, graph: UnitGraph, masks: Tensors, draw: torch.Generator) -> Tensors:
    """Return the parameters, with every entry outside the masks replaced by a number of another value and sign."""
    covered = graph.used_entries({name: mask > 0 for name, mask in masks.items()})
    moved = {}
    for name, value in start.items():
        other = _noise(value, draw).sub_(value, alpha=3)
        moved[name] = torch.where(covered[name].to(value.device), value, other) if name in covered else other
    return moved
