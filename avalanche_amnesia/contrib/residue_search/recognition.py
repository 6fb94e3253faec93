"""What an unlearning removes, copied before it or as hashes, and recognition of it in other tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, lgamma, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia.audit.record import Fingerprint, Kind, Sketch, Trace, UnlearningRecord
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import Strategy

if TYPE_CHECKING:
    from avalanche_amnesia.unlearning.context import UnlearningContext

# Hashes find copies, in any type and shape. Sums of many entries with random signs (a count sketch, Charikar et al.
# 2002) keep inner products up to chance: they find a tensor that contains an update, beside others.

ENTRIES_PER_NUMBER = 16
"""A sketch gives away at most one number per this many entries."""

LARGEST, SMALLEST = 512, 32
"""Numbers of a sketch; a tensor too small for the smallest has none."""

TELLING = 16
"""Tensors with fewer entries are not looked for: too many others are equal to them by chance."""


def values_hash(tensor: Tensor) -> str:
    """SHA-256 of the values as float32, for any type and shape."""
    values = tensor.detach().cpu().reshape(-1).float().contiguous().numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()


def pattern_hash(chosen: Tensor) -> str:
    """SHA-256 of which entries a bool tensor chooses."""
    return hashlib.sha256(np.packbits(chosen.detach().cpu().reshape(-1).numpy()).tobytes()).hexdigest()


def telling(tensor: Tensor) -> bool:
    """Tell whether a tensor is large and varied enough for equality with it to mean something."""
    return tensor.numel() >= TELLING and bool((tensor != tensor.reshape(-1)[0]).any())


def sketch(tensor: Tensor, name: str) -> Tensor | None:
    """The sketch of a tensor, float64 ``(numbers,)``; None where it is too small for one."""
    n = tensor.numel()
    numbers = min(LARGEST, n // ENTRIES_PER_NUMBER)
    if numbers < SMALLEST:
        return None
    generator = torch.Generator().manual_seed(derive_seed(0, "sketch", name, n))
    group = torch.randint(numbers, (n,), generator=generator)
    sign = torch.randint(2, (n,), generator=generator).double().mul_(2).sub_(1)
    signed = tensor.detach().cpu().reshape(-1).double() * sign
    return torch.zeros(numbers, dtype=torch.float64).index_add_(0, group, signed)


# Evidence -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Copies of what tasks put into a model. They *are* residue: keep them outside the strategy.

    Attributes:
        tasks: the tasks.
        own: name → tensor that belongs only to the tasks (heads, embeddings, normalisation).
        masks: name → bool tensor of the units, or weights, that a task's mask opens; whole, and by layer.
        before: shared tensor → values with the tasks.
        after: shared tensor → values without them.
        samples: inputs of the tasks, ``(n, …)``; None: not looked for.
        updates: shared tensor → what the tasks wrote, float64: ``before`` minus ``after``.
    """

    tasks: tuple[int, ...]
    own: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    samples: Tensor | None = None
    updates: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        differences = {name: self.before[name].double() - self.after[name].double() for name in self.before}
        object.__setattr__(self, "updates", differences)

    @classmethod
    def of(cls, context: UnlearningContext, samples: Tensor | None = None) -> Evidence:
        """Copy what an unlearning, worked out and not applied yet, is about to remove from a model."""
        plan, removal = context.plan, context.removal
        state = {name: value.detach().cpu().clone() for name, value in context.model.state_dict().items()}
        removed = [name for name in plan.removed if name not in plan.uninformative_masks]
        return cls(
            tasks=context.tasks,
            own={name: state[name] for name in removed if name in state},
            masks=_masks(context.model, context.tasks, context.opened_whole),
            before={name: state[name] for name in removal.values},
            after={name: value.detach().cpu().clone() for name, value in removal.values.items()},
            samples=None if samples is None else samples.detach().cpu(),
        )

    def traces(self) -> tuple[Trace, ...]:
        """Hashes of everything that is large and varied enough."""
        values: list[tuple[Kind, Mapping[str, Tensor]]] = [
            ("own tensor", self.own),
            ("state before", self.before),
            ("update", self.updates),
        ]
        of_values = [
            Trace(kind, name, tensor.numel(), values_hash(tensor))
            for kind, tensors in values
            for name, tensor in tensors.items()
            if telling(tensor)
        ]
        masks = [
            Trace("mask", name, mask.numel(), pattern_hash(mask)) for name, mask in self.masks.items() if telling(mask)
        ]
        return (*of_values, *masks)

    def fingerprint(self) -> Fingerprint:
        """One-way fingerprint, which a record may keep."""
        sketches = {}
        for name, update in self.updates.items():
            of_update, of_after = sketch(update, name), sketch(self.after[name], name)
            if of_update is not None and of_after is not None and bool(update.any()):
                sketches[name] = Sketch(update.numel(), tuple(of_update.tolist()), tuple(of_after.tolist()))
        return Fingerprint(self.traces(), sketches)


def take_evidence(strategy: Strategy, tasks: Iterable[int], experiences: Iterable[Any] = ()) -> Evidence:
    """Evidence of what tasks have put into the model, to be looked for after they are unlearned; changes nothing.

    Args:
        strategy: with an :class:`~avalanche_amnesia.training.UnlearningPlugin`.
        tasks: that could be unlearned now.
        experiences: the tasks' data, if their samples shall be looked for too.

    Raises:
        RequestError: if the tasks can't be requested now.
    """
    # lazy: a search of files needs no host, which takes seconds
    from avalanche_amnesia.benchmarks.data import task_data
    from avalanche_amnesia.training.host.lookup import unlearning_of

    samples = [task_data(experience)[0] for experience in experiences]
    context = unlearning_of(strategy).prepared(strategy, tasks)
    return Evidence.of(context, torch.cat(samples) if samples else None)


def take_fingerprint(context: UnlearningContext) -> Fingerprint:
    """Fingerprint of what an unlearning removes, for its record: ``strategy.unlearn([0], fingerprint=…)``."""
    return Evidence.of(context).fingerprint()


def _masks(model: nn.Module, tasks: Sequence[int], uninformative: Mapping[int, Collection[str]]) -> dict[str, Tensor]:
    from avalanche_amnesia.models.task_masked import TaskMaskedModel  # lazy, as above

    if not isinstance(model, TaskMaskedModel):
        return {}
    found: dict[str, Tensor] = {}
    for task in tasks:
        if task in model.masks:
            parts = {name: mask.detach().cpu() > 0 for name, mask in model.masks[task].items()}
            of_layers = {name: part for name, part in parts.items() if name not in uninformative.get(task, ())}
            found |= {f"mask of task {task}, {name}": part for name, part in of_layers.items()}
            if of_layers:
                found[f"mask of task {task}"] = torch.cat([part.reshape(-1) for part in parts.values()])
    return found


# Recognition --------------------------------------------------------------------------------------------------------

Match = tuple[str, str, float]
"""Kind, name and strength of a finding."""

CHANCE = 1e-9
"""The largest probability with which chance may make one comparison with one update a finding.

An audit that makes ``n`` comparisons (each tensor with every update of its size) therefore calls an unrelated tensor
residue with a probability of at most ``n · 1e-9``: one in ten thousand for a hundred thousand of them. Chance means
entries that have nothing to do with the update's; what training makes alike is kept apart by the parts below.
"""

HELD = 0.5
"""Share of an update that counts as held. Updates of different tasks are correlated, but less than that."""

ALIKE = 0.7
"""Correlation with an update, at any scale, that counts as a copy of it."""


class Recogniser:
    """Recogniser of what was removed, by what a record and the evidence know of it."""

    def __init__(self, record: UnlearningRecord, evidence: Evidence | None = None) -> None:
        known = (change for change in record.changes if change.name not in record.plan.uninformative_masks)
        self._bits = {change.before: change for change in known if change.before is not None}
        self._print = record.fingerprint
        self._evidence = evidence
        traces = [*(self._print.traces if self._print else ()), *(evidence.traces() if evidence else ())]
        self._values: dict[int, dict[str, Trace]] = {}
        self._patterns: dict[int, dict[str, Trace]] = {}
        for trace in traces:
            store = self._patterns if trace.kind == "mask" else self._values
            store.setdefault(trace.size, {})[trace.digest] = trace
        samples = None if evidence is None else evidence.samples
        self._samples = frozenset(() if samples is None else map(values_hash, samples))
        self._sample_size = 0 if samples is None else samples[0].numel()

    def matches(self, tensor: Tensor) -> Iterator[Match]:
        """Matches of a tensor with what was removed; at most one of each sort."""
        if tensor.is_meta:
            return
        tensor = _plain(tensor)
        if telling(tensor):
            copy = self._copy(tensor)
            if copy is not None:
                yield copy
                return
            yield from self._parts(tensor)
        yield from self._rows(tensor)

    def _copy(self, tensor: Tensor) -> Match | None:
        masks = self._patterns.get(tensor.numel(), {})
        for threshold in (0.0, 0.5) if masks else ():  # of a binary mask, and of a soft one
            mask = masks.get(pattern_hash(tensor > threshold))
            if mask is not None:
                return "mask", mask.name, 1.0
        change = self._bits.get(tensor_hash(tensor)) if self._bits else None
        if change is not None:
            return "own tensor" if change.after is None else "state before", change.name, 1.0
        values = self._values.get(tensor.numel(), {})
        trace = values.get(values_hash(tensor)) if values else None
        return None if trace is None else (trace.kind, trace.name, 1.0)

    def _parts(self, tensor: Tensor) -> Iterator[Match]:
        """Search a tensor for an update, besides a multiple of the state without it and a constant."""
        if tensor.dtype == torch.bool:
            return
        n = tensor.numel()
        for name, x, update, beside in self._comparable(tensor, n):
            held, alike, chance = _regress(x, update, beside)
            if chance <= CHANCE and (held > HELD or abs(alike) > ALIKE):
                yield "update", name, held if held > HELD else alike

    def _comparable(self, tensor: Tensor, n: int) -> Iterator[tuple[str, Tensor, Tensor, tuple[Tensor, Tensor]]]:
        if self._evidence is not None:
            x = tensor.detach().cpu().reshape(-1).double()
            for name, update in self._evidence.updates.items():
                if update.numel() == n:
                    moved = update.reshape(-1) != 0  # elsewhere the tensor says nothing about the update
                    after = self._evidence.after[name].reshape(-1).double()
                    yield name, x[moved], update.reshape(-1)[moved], (torch.ones_like(x[moved]), after[moved])
        elif self._print is not None:
            for name, known in self._print.sketches.items():
                if known.size == n:
                    of_x = sketch(tensor, name)
                    of_ones = sketch(torch.ones(n), name)
                    assert of_x is not None
                    assert of_ones is not None
                    update, after = (torch.tensor(values).double() for values in (known.update, known.after))
                    yield name, of_x, update, (of_ones, after)

    def _rows(self, tensor: Tensor) -> Iterator[Match]:
        if not self._samples or tensor.numel() == 0:
            return
        rows = tensor.reshape(1, -1) if tensor.numel() == self._sample_size else tensor
        if rows.dim() < 2 or rows[0].numel() != self._sample_size:
            return
        found = sum(values_hash(row) in self._samples for row in rows)
        if found:
            yield "sample", f"{found} of {len(rows)}", found / len(rows)


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers, laid out densely and in a type that torch computes with."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        parts = torch.view_as_real(tensor)
        tensor = parts[..., 0] if not bool(parts[..., 1].any()) else parts
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _regress(x: Tensor, update: Tensor, beside: Sequence[Tensor]) -> tuple[float, float, float]:
    """``x = Σ α·beside + β·update + noise``: β, the partial correlation, and how probable that is by chance.

    The correlation of unrelated entries is that of a direction drawn at random: in ``ν`` dimensions and one more it
    reaches ``r`` with a probability of at most ``(1 − r²)^(ν/2)``. One large entry that both happen to have would bring
    it near 1, so the ranks of the entries, whose correlation by chance depends on no entry's size, must be as
    improbable; of ``n`` entries no order is more so than ``2 / n!``.
    """
    # A shortcut: the order of fewer than 13 entries is never improbable enough (2 / 12! > CHANCE).
    if len(x) < 8 or not bool(x.isfinite().all()):
        return 0.0, 0.0, 1.0
    whole = float(x @ x), float(update @ update)
    # Gram–Schmidt: x and the update without their parts along the constant and the state.
    basis: list[Tensor] = []
    for other in beside:
        size = float(other.norm())
        part = _without(other, basis)
        if float(part.norm()) > _NOTHING * size:
            basis.append(part / part.norm())
    x, update = _without(x, basis), _without(update, basis)
    of_x, of_update = float(x @ x), float(update @ update)
    if of_x <= _NOTHING**2 * whole[0] or of_update <= _NOTHING**2 * whole[1]:
        return 0.0, 0.0, 1.0
    held, alike = float(x @ update) / of_update, float(x @ update) / sqrt(of_x * of_update)
    dimensions = len(x) - 1 - len(basis)
    chance = _by_chance(alike, dimensions)
    if chance <= CHANCE:  # only now: ranks take a sort
        of_ranks = float(torch.corrcoef(torch.stack([_ranks(x), _ranks(update)]))[0, 1])
        chance = max(chance, _by_chance(of_ranks, dimensions), 2 * exp(-lgamma(len(x) + 1)))
    return held, alike, chance


def _by_chance(correlation: float, dimensions: int) -> float:
    """A bound on the probability that a direction drawn at random is as near another one, or its opposite."""
    return max(0.0, 1 - correlation**2) ** (dimensions / 2)


def _ranks(vector: Tensor) -> Tensor:
    """Place of every entry in order of size, float64; ties share their mean."""
    _, group, sizes = vector.unique(return_inverse=True, return_counts=True)
    return (sizes.cumsum(0) - (sizes - 1) / 2).double()[group]


_NOTHING = 1e-6
"""The part of a vector that float32 may leave where nothing is."""


def _without(vector: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """Part of a vector that is orthogonal to an orthonormal basis."""
    for direction in basis:
        vector = vector - direction * float(vector @ direction)
    return vector
