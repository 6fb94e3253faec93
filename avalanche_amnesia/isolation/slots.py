"""Layers cut into equal slots of units, and what changes when two slots change places.

Where all that is laid out by units (weights, masks, norms, the columns of heads) is permuted in one and the same way,
a network computes what it computed before, but for the order of its sums. Which networks are of that kind is read off
the sets of units behind every entry, and tried out once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.models.own_modules import OwnModules
from avalanche_amnesia.saving.classes import saveable


class SlotError(ValueError):
    """The slots of a network can't change places; the message names the tensor that is in the way."""


@saveable
@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor that is laid out by units."""

    dim: int
    table: Tensor

    def index(self, size: int, source: Sequence[int], device: torch.device) -> Tensor:
        """Index whose place each index of the dimension takes, if slot ``s`` takes that of ``source[s]``."""
        index = torch.arange(size)
        index[self.table.reshape(-1)] = self.table[list(source)].reshape(-1)
        return index.to(device)

    def within(self, shape: Sequence[int], slots: Collection[int], device: torch.device) -> Tensor:
        """Mask of a tensor's indices that lie in one of some slots: bool, broadcasts over the tensor."""
        inside = torch.zeros(shape[self.dim], dtype=torch.bool, device=device)
        inside[self.table[sorted(slots)].reshape(-1).to(device)] = True
        return inside.reshape(-1, *(1,) * (-self.dim - 1))


def gathered(value: Tensor, axes: Sequence[Axis], source: Sequence[int]) -> Tensor:
    """A tensor in which every slot ``s`` holds what slot ``source[s]`` held; the same tensor where it has no axis."""
    for axis in axes:
        value = value.detach().index_select(axis.dim, axis.index(value.shape[axis.dim], source, value.device))
    return value


@saveable
class SlotTables:
    """Places of the units of every slot, in every tensor of a model.

    A layer of ``n`` units has ``n // slots`` of them in each slot, one slot after the other; what is left over at its
    end is in no slot.
    """

    def __init__(self, model: MaskedModel, slots: int) -> None:
        self.slots = slots
        graph = model.graph
        tables, offset, self._slot_of, self._place_of = [], 0, [-1] * model.n_units, list(range(model.n_units))
        for layer in graph.layers.values():
            size = layer.units // slots
            tables.append(offset + torch.arange(slots * size).reshape(slots, size))
            for unit in range(slots * size):
                self._slot_of[offset + unit], self._place_of[offset + unit] = unit // size, offset + unit % size
            offset += layer.units
        self.units = Axis(-1, torch.cat(tables, 1))
        """Of a vector over all units."""
        self._sets = graph.sets
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.parameters = {name: self._axes(f"parameter {name}", factors) for name, factors in graph.factors.items()}
        """Parameter name inside the backbone → its axes."""
        self.output = self._axes("the features", (graph.output,))
        """Of a vector of features."""
        self.owned = {
            name: () if spec.sets is None else self._axes(f"norm {name}", (spec.sets,))
            for name, spec in model.backbone.owned.items()
        }
        """Name of what each task has a copy of → the axes of its tensors."""
        _try_out(model, self)

    def axes(self, name: str) -> tuple[Axis, ...]:
        """Axes of a tensor of the model, by its name there; none where it is not laid out by units."""
        kind, _, rest = name.partition(".")
        if kind == "backbone":
            return self.parameters.get(rest, ())
        if kind in ("_binary", "_embeddings") or name == "embedding":
            return (self.units,)
        if kind == "heads":
            return self.output if name.endswith(".weight") else ()
        if kind == "own":
            return self.owned.get(rest.split(".")[1].replace("/", "."), ())
        return ()

    def moved(self, name: str, value: Tensor, source: Sequence[int]) -> Tensor:
        """A tensor of the model in which every slot ``s`` holds what ``source[s]`` held; a number stays as it is."""
        return gathered(value, self.axes(name) if value.dim() else (), source)

    def within(self, slots: Collection[int], device: torch.device) -> Tensor:
        """Units of some slots, bool ``(n_units,)``."""
        return self.units.within((len(self._slot_of),), slots, device)

    def left_over(self, device: torch.device) -> Tensor:
        """Units of no slot, bool ``(n_units,)``."""
        return torch.tensor([slot < 0 for slot in self._slot_of], device=device)

    def _axes(self, what: str, factors: Sequence[Tensor]) -> tuple[Axis, ...]:
        """The dimensions along which a tensor's sets of units change with the slot."""
        by_dim: dict[int, list[list[int]]] = {}
        for factor in factors:
            varying = [dim for dim, size in enumerate(factor.shape) if size > 1]
            if len(varying) > 1:
                raise SlotError(f"{what}: the units along one of its dimensions depend on another (a group of units)")
            numbers = factor.reshape(-1).tolist()
            if varying:
                by_dim.setdefault(varying[0] - factor.dim(), []).append(numbers)
            elif self.slots > 1 and self._look_up(what, numbers[0])[0] >= 0:
                raise SlotError(f"{what}: one unit stands behind all of it")
        axes = ((dim, self._table(what, list(zip(*columns, strict=True)))) for dim, columns in by_dim.items())
        return tuple(Axis(dim, table) for dim, table in axes if table.numel())

    def _table(self, what: str, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Indices of each slot along a dimension, from the sets behind each index."""
        indices: list[list[int]] = [[] for _ in range(self.slots)]
        keys: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in range(self.slots)]
        for index, numbers in enumerate(rows):
            found = [self._look_up(what, number) for number in numbers]
            slots = {slot for slot, _ in found if slot >= 0}
            if len(slots) > 1:
                raise SlotError(f"{what}: units of slots {sorted(slots)} stand behind one of its indices")
            for slot in slots:
                indices[slot].append(index)
                keys[slot].append(tuple(places for _, places in found))
        if any(of_slot != keys[0] for of_slot in keys):
            raise SlotError(f"{what}: its slots are not laid out alike")
        return torch.tensor(indices, dtype=torch.int64)

    def _look_up(self, what: str, number: int) -> tuple[int, tuple[int, ...]]:
        """The slot of a set (−1: none) and the units that take its place in the first slot."""
        if number not in self._known:
            members = self._sets.members(number)
            slots = {self._slot_of[unit] for unit in members}
            if len(slots) > 1:
                raise SlotError(f"{what}: it mixes units of slots {sorted(slots)}")
            places = tuple(self._place_of[unit] for unit in members) or (-1 - number,)
            self._known[number] = (slots.pop() if slots else -1, places)
        return self._known[number]


@torch.no_grad()
def _try_out(model: MaskedModel, tables: SlotTables) -> None:
    """Run the network with other weights, in double precision, before and after its slots changed places.

    Entries that no unit stands behind may well be laid out by units (a table of positions, a module of the user's own).
    """
    if tables.slots == 1:
        return
    draw = torch.Generator().manual_seed(0)
    twin = deepcopy(model).cpu().double()
    for name, value in (*twin.backbone.named_parameters(), *twin.backbone.named_buffers()):
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=draw, dtype=value.dtype)
            value.copy_(value * (0.5 + noise) + 0.1 * (noise if name.endswith("var") else noise - 0.5))
    shape = (2, *model.graph.input_shape)
    if model.graph.input_dtype.is_floating_point:
        x = 3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    else:
        x = torch.randint(2, shape, generator=draw).to(model.graph.input_dtype)
    source = [*range(1, tables.slots), 0]
    masks = [torch.ones(model.n_units), (torch.rand(model.n_units, generator=draw) < 0.7).float()]
    try:
        with evaluating(twin):
            before = [twin.masked_features(x, mask, twin.fresh_parts()) for mask in masks]
            rounded = _in_the_last_bit(twin, lambda: twin.masked_features(x, masks[0], twin.fresh_parts()), draw)
            own = twin.fresh_parts()
            for name, parameter in twin.backbone.named_parameters(prefix="backbone"):
                parameter.copy_(tables.moved(name, parameter, source))
            move_own(own, tables, source)
            after = [twin.masked_features(x, gathered(mask, (tables.units,), source), own) for mask in masks]
    except RuntimeError as error:
        raise SlotError(
            f"the network does not run in double precision, so that this can't be tried ({error})"
        ) from error
    rounding = float((rounded - before[0]).abs().max() / before[0].abs().max().clamp_min(1e-300))
    allowed = max(1e-10, min(1e-7, 100 * rounding))  # deep networks amplify how sums in another order are rounded
    for here, there in zip(before, after, strict=True):
        expected = gathered(here, tables.output, source)
        if not float((expected - there).abs().max()) <= allowed * float(expected.abs().max()):  # a NaN is neither
            raise SlotError("the network computes something else once its slots have changed places")


def _in_the_last_bit(model: MaskedModel, run: Callable[[], Tensor], draw: torch.Generator) -> Tensor:
    """Result of a run with the backbone's parameters off by one in their last bits; they are put back."""
    values = {parameter: parameter.clone() for parameter in model.backbone.parameters()}
    for parameter in values:
        sign = torch.rand(parameter.shape, generator=draw, dtype=parameter.dtype).sub_(0.5).sign_()
        parameter.mul_(1 + sign * torch.finfo(parameter.dtype).eps)
    result = run()
    for parameter, value in values.items():
        parameter.copy_(value)
    return result


def move_own(own: OwnModules, tables: SlotTables, source: Sequence[int]) -> None:
    """Let every slot ``s`` of what a task has of its own take the values of ``source[s]``."""
    for name, value in own_tensors(own).items():
        value.copy_(tables.moved(f"own.0.{name}", value, source))


def own_tensors(own: OwnModules) -> Mapping[str, Tensor]:
    """Parameters and buffers of what a task has of its own, by name."""
    return {name: value.detach() for name, value in (*own.named_parameters(), *own.named_buffers())}
