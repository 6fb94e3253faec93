"""Trial of a masked backbone: all that lies outside of a mask moves, and not one bit of the features may.

The rules say which entries a mask has to protect. This asks the network itself: it runs through a random mask, once
with some parameters and once with every entry outside of the mask replaced, in training and in evaluation mode.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.unit_graph.backbones import first_real, same_draws, undisturbed
from avalanche_amnesia.unit_graph.exporting import features_of, where
from avalanche_amnesia.unit_graph.findings import ModelError
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.program import Program
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.units import compact
from avalanche_amnesia.unit_graph.values import Masked

_SAMPLES = 4
_LARGE = 1 << 16
"""Numbers of a sample from which on two samples will do: a norm has positions enough in each."""
_CLOSE = 1e-3
_FEW = 1_000_000
Tensors = dict[str, Tensor]


@torch.no_grad()
def try_out(
    module: nn.Module, graph: UnitGraph, owned: Mapping[str, OwnedSpec], programs: Mapping[bool, Program]
) -> None:
    """Run random masks on random parameters, in both modes, with and without everything outside of them moved."""
    draw = torch.Generator().manual_seed(0)
    like = first_real(module)
    mode = module.training
    held = {n: p for n, p in module.named_parameters() if p.is_floating_point() and p.requires_grad}
    start = {name: _as_if_trained(value, draw) for name, value in held.items()}
    own = nn.ModuleList(spec.make(module) for spec in owned.values())
    for name, value in (*own.named_parameters(), *own.named_buffers()):
        if value.is_floating_point():
            value.copy_(_as_if_trained(value, draw).abs() if name.endswith("var") else _as_if_trained(value, draw))
    rounds = 2 if sum(value.numel() for value in start.values()) < _FEW else 1
    run = _Run(module, owned, own, graph.inputs.batch(_samples(graph), draw, like))
    try:
        for training in (True, False) * rounds:
            module.train(training)
            masks = {name: _mask(layer.units, draw, like.device) for name, layer in graph.layers.items()}
            moved = _moved_outside(start, graph, masks, draw)
            before, after = run(start, masks), run(moved, masks)
            if not bool(same_bits(before, after).all()):
                place = _first_difference(run, programs[training], graph, masks, start, moved)
                raise ModelError(
                    f"in {'training' if training else 'evaluation'} mode the features of one task moved with what lies "
                    f"outside of its mask, first in {place}: masks would not protect this backbone. Please report it; "
                    "meanwhile declare the module around it frozen=[…] or task_owned=[…]"
                )
    finally:
        module.train(mode)


@torch.no_grad()
def compare(backbone: nn.Module, module: nn.Module, graph: UnitGraph, owned: Mapping[str, OwnedSpec]) -> None:
    """Compare the features of a backbone with those of its masked form under masks that are open."""
    like = first_real(module)
    x = graph.inputs.batch(_samples(graph), None, like)
    open_masks = {name: torch.ones(layer.units, device=like.device) for name, layer in graph.layers.items()}
    with undisturbed(module):
        module.eval()
        own = nn.ModuleList(spec.make(module) for spec in owned.values())
        try:
            masked = _Run(module, owned, own, x)({}, open_masks)
        except ModelError as error:  # about sizes: read for two samples, and this is another number
            raise ModelError(f"forward of {type(backbone).__name__}: {error}") from error
    with undisturbed(backbone):
        torch.manual_seed(0)
        plain = features_of(backbone.eval(), graph.inputs, graph.inputs.tensors(x))
    largest = float(plain.abs().nan_to_num().amax().clamp_min(1e-6)) if plain.numel() else 1.0
    if plain.shape != masked.shape or not torch.allclose(plain, masked, _CLOSE, _CLOSE * largest, equal_nan=True):
        raise ModelError(
            f"what torch.export made of {type(backbone).__name__} computes something else than its forward: take out "
            "of it what differs from call to call (Python's own random numbers, counters, global state)"
        )


def _samples(graph: UnitGraph) -> int:
    return 2 if max(map(prod, graph.inputs.shapes)) >= _LARGE else _SAMPLES


class _Run:
    """Forwards of a masked backbone with other parameters, that change nothing and draw the same numbers."""

    def __init__(self, module: nn.Module, owned: Mapping[str, OwnedSpec], own: nn.ModuleList, x: Any) -> None:
        self.module, self.owned, self.own, self.x = module, owned, own, x

    @contextmanager
    def _repeatable(self) -> Iterator[dict[str, nn.Module]]:
        statistics = [buffer.clone() for buffer in self.own.buffers()]
        with same_draws(self.module):
            torch.manual_seed(0)
            self.own.train(self.module.training)
            yield dict(zip(self.owned, self.own, strict=True))
        for buffer, value in zip(self.own.buffers(), statistics, strict=True):
            buffer.copy_(value)

    def __call__(self, parameters: Tensors, masks: Tensors) -> Tensor:
        """The features."""
        with self._repeatable() as own:
            result: Tensor = functional_call(self.module, parameters, (self.x, own, masks), tie_weights=False)
        return result

    def values(self, program: Program, parameters: Tensors, masks: Tensors) -> dict[fx.Node, Any]:
        """Every node's value."""
        stepped = _Stepped(self.module, program)
        named = {f"module.{name}": value for name, value in parameters.items()}
        with self._repeatable() as own:
            found: dict[fx.Node, Any] = functional_call(stepped, named, (self.x, own, masks), tie_weights=False)
        return found


class _Stepped(nn.Module):
    """A masked backbone that returns what every node of its graph does."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        super().__init__()
        self.module, self._program = module, program

    def forward(self, x: Any, own: Mapping[str, nn.Module], masks: Tensors) -> dict[fx.Node, Any]:
        steps = fx.Interpreter(self.module, garbage_collect_values=False, graph=self._program.graph)
        steps.run(*self.module.inputs.tensors(x), own, masks)  # type: ignore[union-attr, operator]
        return steps.env


def _as_if_trained(value: Tensor, draw: torch.Generator) -> Tensor:
    """Numbers of the same size that no initialisation gives: a weight that starts at zero would hide what it reads."""
    noise = _noise(value, draw)
    return _by_lines(value, 1 + 0.2 * noise, 0.02 * noise.roll(1))


def _noise(like: Tensor, draw: torch.Generator) -> Tensor:
    """Normal numbers, as many as a tensor has, but few for a large one."""
    return torch.randn(min(like.numel(), 1 << 16), generator=draw).to(like)


def _by_lines(value: Tensor, factor: Tensor | float, added: Tensor) -> Tensor:
    """``value · factor + added``, of which a large tensor takes the same numbers again and again: in one pass."""
    flat, n = value.detach().reshape(-1), max(1, len(added))
    result, lines = torch.empty_like(flat), len(flat) // n * n
    for part, out in ((flat[:lines].view(-1, n), result[:lines].view(-1, n)), (flat[lines:], result[lines:])):
        length = part.shape[-1]
        by = factor[:length] if isinstance(factor, Tensor) else torch.full_like(added[:length], factor)
        torch.addcmul(added[:length], part, by, out=out)
    return result.view(value.shape)


def _mask(units: int, draw: torch.Generator, device: torch.device) -> Tensor:
    mask = (torch.rand(units, generator=draw) < 0.5).float()
    mask[int(torch.randint(units, (), generator=draw))] = 1.0
    return mask.to(device)


def _moved_outside(start: Tensors, graph: UnitGraph, masks: Tensors, draw: torch.Generator) -> Tensors:
    """The parameters with every entry outside of a mask replaced, its sign included."""
    covered = dict(graph.reads({name: mask > 0 for name, mask in masks.items()}))
    moved = {}
    for name, value in start.items():
        other = _by_lines(value, -3.0, _noise(value, draw))
        moved[name] = torch.where(covered[name].to(value.device), value, other) if name in covered else other
    return moved


def _first_difference(
    run: _Run, program: Program, graph: UnitGraph, masks: Tensors, start: Tensors, moved: Tensors
) -> str:
    """Find the first value that differs although the mask should have protected it."""
    vector = torch.cat([masks[name] for name in graph.layers])
    use = graph.sets.use(vector)
    before, after = run.values(program, start, masks), run.values(program, moved, masks)
    for node in program.graph.nodes:
        value = program.values.get(node)
        if value is None or not isinstance(before[node], Tensor):
            continue
        same = same_bits(before[node], after[node])
        ids = compact(value.ids)
        if value.masked is Masked.ZERO and ids.shape[:1] == (1,):
            same = same & ((before[node] == 0) | (use[ids.to(use.device)] > 0))  # what the rule says of masked entries
        if value.masked is Masked.DIRTY and ids.shape[:1] == (1,):  # units lie alike in all samples
            same = same | (use[ids.to(use.device)] == 0)
        elif value.masked is Masked.DIRTY:
            continue
        if not bool(same.all()):
            return where(node)
    return "an operation that folds units and samples into one axis"
