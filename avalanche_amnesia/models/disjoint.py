"""Weight pools: a task uses only its part of a network's weights, and the parts of permanent, never unlearned tasks."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass
from functools import lru_cache
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.models.multi_head import MultiHeadModel, shapes, with_parts
from avalanche_amnesia.models.substitutes import StateSite, hash_tensors, state_sites, tensor_outline
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.text_table import text_table
from avalanche_amnesia.unit_graph.backbones import run_backbone
from avalanche_amnesia.unit_graph.findings import ModelError

_DEALT, _ENTRIES = "dealt", "entries."
"""State-dict keys of a task's weights: its encoded :class:`Allocation`, and the prefix of its tensors."""

_COPIES = 0.05
"""Fraction of parameters that may be spent on per-task copies of the smallest layers (chosen on validation images)."""

_PERMUTATIONS = 32
"""Number of random permutations drawn to divide a tensor; each row uses one, with its slots shifted cyclically."""


@dataclass(frozen=True)
class Allocation:
    """Weights that a task may use: its own part (slot) of every tensor, and the parts of the tasks in ``reads``.

    The partition of the entries is computed from (seed, tensor name) whenever it is needed, so it takes no memory.
    """

    seed: int
    slots: int  # number of disjoint parts of every tensor
    slot: int  # the part that the task owns, from 0
    reads: tuple[int, ...] = ()  # permanent tasks whose entries the task uses but never changes

    def encode(self) -> Tensor:
        """Return the attributes as an int64 tensor: ``seed``, ``slots``, ``slot``, then the tasks in ``reads``."""
        *numbers, reads = astuple(self)
        return torch.tensor([*numbers, *reads], dtype=torch.int64)

    @classmethod
    def decode(cls, numbers: Tensor) -> Self:
        """Convert a tensor from :meth:`encode` back to an :class:`Allocation`; raise ValueError if it is invalid."""
        found = numbers.tolist() if numbers.dtype == torch.int64 and numbers.dim() == 1 else []
        if len(found) < 3 or not 0 <= found[2] < found[1]:
            raise ValueError(f"{found} is no share: seed, slots, slot, tasks that are read")
        return cls(found[0], found[1], found[2], tuple(found[3:]))

    def overlaps(self, other: Self) -> bool:
        """Return True if a task with this allocation and a task with ``other`` can own the same weight."""
        return (self.seed, self.slots) != (other.seed, other.slots) or self.slot == other.slot

    def can_partition(self, shape: torch.Size) -> bool:
        """Return True if a tensor of this shape can be partitioned among tasks; otherwise each task has its own copy.

        Tensors with a single row (biases, norms, a token, an embedding of positions) are copied, and tensors whose rows
        have fewer entries than slots, because outputs would lose all inputs. Such tensors are small.
        """
        return len(shape) > 1 and shape[0] > 1 and prod(shape[1:]) >= self.slots

    def own_entries(self, name: str, shape: torch.Size) -> Tensor:
        """Return a bool tensor of ``shape``: True at the entries of parameter ``name`` that the task owns."""
        codes, rows, turns = _partition(self.seed, name, shape[0], prod(shape[1:]), self.slots)
        wanted = ((self.slot - turns) % self.slots).to(codes.dtype)
        return codes.index_select(0, rows).eq_(wanted[:, None]).view(torch.bool).reshape(shape)


@lru_cache(maxsize=1024)  # small: a few rows per matrix
def _partition(seed: int, name: str, n_rows: int, n_in: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a random partition: slots ``(permutations, n_in)``, and which permutation and shift each row uses."""
    # RandomState's stream never changes between numpy versions, so that saved states stay valid.
    random = np.random.RandomState(derive_seed(seed, "shares", name) % 2**32)
    ranks = np.stack([random.permutation(n_in) for _ in range(min(_PERMUTATIONS, n_rows))])
    rows, turns = random.randint(len(ranks), size=n_rows), random.randint(slots, size=n_rows)
    kind = torch.uint8 if slots <= 256 else torch.int32
    return torch.from_numpy(ranks % slots).to(kind), torch.from_numpy(rows), torch.from_numpy(turns)


class TaskWeights(nn.Module):
    """Weights and buffers of one task: a whole network during its training, later only the entries that it owns.

    The names of ``entries`` have "/" instead of ".". ``dealt``: encoded :class:`Allocation`, None before the partition.
    """

    def __init__(self, entries: nn.Module, dealt: Tensor | None = None) -> None:
        super().__init__()
        self.entries = entries
        self.dealt: Tensor
        self.register_buffer(_DEALT, dealt)
        self.backbone: dict[str, str] = {}  # hashes of its tensors when the training began; empty for a finished task

    @property
    def share(self) -> Allocation:
        """Return the task's allocation: which weights it owns, and which weights of other tasks it may read."""
        return Allocation.decode(self.dealt)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the task, by their names in the backbone."""
        held = (*self.entries.named_parameters(), *self.entries.named_buffers())
        return {name.replace("/", "."): tensor for name, tensor in held}


class DisjointModel(MultiHeadModel):
    """Multi-head model whose weights are partitioned among the tasks, for any network.

    A task uses only its own part of every layer's weights, and the parts of permanent tasks; all other weights are +0
    for it. Each task has its own biases, norms, buffers and head, and its own copy of the smallest layers
    (:meth:`partitioned`). So no task's training or features depend on an unlearnable task. Nothing is traced, so
    ``forward`` may be any code.

    The backbone itself never changes. Every part starts from its values, scaled for the missing weights, and unknown
    tasks run through it. All tasks share parameters without gradients (e.g. of a pretrained network).

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``; it must support ``deepcopy``.
        n_features: width of the features; by default ``backbone.features``, or the width found by running the backbone.

    Raises:
        ModelError: if the width of the features is unknown, or the backbone can't be copied.
    """

    features_per_task = True
    state_per_task = True
    isolates = True

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        self._learning = frozenset(name for name, p in backbone.named_parameters() if p.requires_grad)
        self._network_cache = _NetworkCache()
        self.copied()  # raises if the backbone can't be copied

    # Shares ---------------------------------------------------------------------------------------------------

    def share(self, task: int) -> Allocation | None:
        """Return the :class:`Allocation` (usable weights) of a task, or None if :meth:`deal` has not assigned one."""
        held: TaskWeights | None = self.task_parts(task)
        return None if held is None or held.dealt is None else held.share

    def tasks_read(self, task: int) -> Sequence[int]:
        """Return the other tasks whose parameters the network of the finished ``task`` uses."""
        share = self.share(task)
        return () if share is None else share.reads

    def partitioned(self, share: Allocation) -> dict[str, nn.Parameter]:
        """Return a dict of name to parameter, for the parameters whose entries are divided among the tasks.

        Each of the ``share.slots`` parts of a parameter can belong to one task. Of every other trainable parameter each
        task has its own copy: of biases, norms etc. (:meth:`Allocation.can_partition`), and of the smallest matrices
        and kernels, while the copies for all slots together are at most a twentieth of the network.
        """
        learning = {name: parameter for name, parameter in self.backbone.named_parameters() if name in self._learning}
        room = _COPIES * sum(p.numel() for p in learning.values()) / share.slots
        dealt = {name: p for name, p in learning.items() if share.can_partition(p.shape)}
        for name, parameter in sorted(dealt.items(), key=lambda item: item[1].numel()):
            room -= parameter.numel()
            if room < 0:
                break
            del dealt[name]
        return dealt

    def describe(self, slots: int) -> str:
        """Return a table of parameters: whether each is divided into ``slots`` parts, copied per task, or shared.

        Args:
            slots: number of slots, see :class:`~avalanche_amnesia.isolation.Pools`, at least 1.
        """
        share = Allocation(0, checks.whole_number("slots", slots), 0)
        dealt, rows, total = self.partitioned(share), [], 0
        for name, parameter in self.backbone.named_parameters():
            n, rule = parameter.numel(), "each task's own"
            if name not in self._learning:
                n, rule = 0, "without gradients: read by all"
            elif name in dealt:
                n, rule = round(n / slots), f"dealt to {slots} slots"
            total += n
            rows.append((name, " × ".join(map(str, parameter.shape)), rule, f"{n:,}"))
        table = text_table(("parameter", "shape", "rule", "per task"), rows)
        return f"{table}\n{total:,} numbers per task, plus its head\n"

    def begins_as(self, name: str) -> str:
        """Return the name of the parameter that initialises a task's parameter ``name``, or ``name`` if none does."""
        return re.sub(rf"^heads\.\d+\.own\.{re.escape(_ENTRIES)}", "backbone.", name)

    def free_share(self) -> float:
        """Return the fraction of the partitioned weights that no task owns, in [0, 1]."""
        shares = {task: share for task in self.tasks if (share := self.share(task)) is not None}
        parameters = self.partitioned(next(iter(shares.values()))) if shares else {}
        total = sum(parameter.numel() for parameter in parameters.values())
        owned = sum(
            int(share.own_entries(name, p.shape).sum()) for share in shares.values() for name, p in parameters.items()
        )
        return 1 - owned / total if total else 1.0

    # Life of a task -------------------------------------------------------------------------------------------

    def fresh_parts(self) -> TaskWeights:
        """Return a copy of the backbone for a new task; :meth:`deal` later restricts the copy to the task's weights."""
        self._network_cache = _NetworkCache()  # frees memory for the new network
        return TaskWeights(self.copied())

    def copied(self) -> nn.Module:
        """Return a copy of the backbone that shares its frozen parameters; raise ModelError if copying fails."""
        frozen = {id(p): p for name, p in self.backbone.named_parameters() if name not in self._learning}
        try:
            return deepcopy(self.backbone, frozen)
        except Exception as error:
            raise ModelError(
                f"{type(self.backbone).__name__} can't be copied, and every task trains a copy: {error}. What can't be "
                "copied belongs outside of the backbone; torch.nn.utils.parametrizations has a weight_norm that can"
            ) from error

    @torch.no_grad()
    def deal(self, task: int, share: Allocation) -> dict[str, Tensor]:
        """Restrict a task's network to its ``share`` of the weights: initialise own entries, set unused weights to +0.

        Own entries start from the backbone's values times ``1/√density``, for the density of entries that the task uses
        in the tensor.

        Args:
            task: label of a task with a head, and without a partition.
            share: the task's partition.

        Returns:
            Name in the backbone → bool tensor of the task's own entries, for all partitioned parameters.
        """
        held: TaskWeights = self.task_parts(task)
        held.dealt = share.encode()
        held.backbone = hash_tensors(self.backbone, self.backbone.named_parameters())
        parameters, owned = dict(held.entries.named_parameters()), {}
        for name, initial in self.partitioned(share).items():
            mine = owned[name] = share.own_entries(name, initial.shape).to(initial.device)
            theirs = [self._positions_and_values(other, name, initial.shape) for other in share.reads]
            n_read = int(mine.sum()) + sum(len(values) for _, values in theirs)
            parameter = parameters[name]
            parameter.masked_fill_(~mine, 0).mul_((mine.numel() / n_read) ** 0.5)
            for where, values in theirs:
                parameter.masked_scatter_(where, values)
        return owned

    def _positions_and_values(self, task: int, name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return a bool tensor of a finished task's own entries in a parameter of ``shape``, and their values."""
        held: TaskWeights = self.task_parts(task)
        values = held.entries.get_parameter(_without_dots(name)).detach()
        return held.share.own_entries(name, shape).to(values.device), values

    @torch.no_grad()
    def finish_task(self, task: int) -> None:
        """Finish a task's training: replace the task's network by the task's own entries, and freeze these entries.

        Raises:
            ModelError: if forward passes changed a tensor that is no parameter, buffer or tensor attribute of a module,
                or if the training changed the original backbone.
        """
        held: TaskWeights = self.task_parts(task)
        now = hash_tensors(self.backbone, self.backbone.named_parameters())
        moved = sorted(name for name in {*now, *held.backbone} if now.get(name) != held.backbone.get(name))
        if moved:
            raise ModelError(
                f"the training of task {task} changed {moved} of the backbone, of which the task has a copy. Functions "
                "that the backbone holds (hooks, lambdas) and weak references are not copied, and lead to the first "
                "one: let them be methods, or functools.partial of them, and take modules from their arguments"
            )
        before, after = tensor_outline(self.backbone), tensor_outline(held.entries)
        if changed := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
            raise ModelError(
                f"the backbone's forward changes {changed}, or began to keep them: no task can have its own. Make them "
                "buffers, or tensor attributes, that have their final shape when the backbone is wrapped; or keep "
                "nothing"
            )
        given = {site.name: site.value.detach() for site in state_sites(self.backbone)}
        sites = [s for s in state_sites(held.entries) if not bool(same_bits(s.value.detach(), given[s.name]).all())]
        self.store_task(task, with_parts(self.heads[task], self._own_entries(held.entries, held.share, sites)))
        self.heads.finish(task)

    def _own_entries(self, network: nn.Module, share: Allocation, sites: Iterable[StateSite]) -> TaskWeights:
        """Copy from ``network`` the parameter entries that a task owns, and the non-parameter tensors at ``sites``."""
        kept, dealt = nn.Module(), self.partitioned(share)
        for name, parameter in network.named_parameters():
            if name in self._learning:
                own = parameter.detach()
                if name in dealt:
                    own = own.masked_select(share.own_entries(name, own.shape).to(own.device))
                kept.register_parameter(_without_dots(name), nn.Parameter(own.clone(), requires_grad=False))
        for site in sites:
            kept.register_buffer(_without_dots(site.name), site.value.detach().clone())
        return TaskWeights(kept, share.encode().to(self._device))

    def remove_task(self, task: int) -> None:
        """Remove all modules and tensors of a task, and the cached network."""
        self._network_cache = _NetworkCache()
        super().remove_task(task)

    # Forward --------------------------------------------------------------------------------------------------

    def network(self, task: int) -> nn.Module:
        """Return a task's network; a finished task's network is valid only until the next call for another task."""
        if task not in self.heads:
            return self.backbone
        if task in self.heads.unfinished:
            return self.task_parts(task).entries
        return self._network_cache.network(self, task)

    def _features(self, x: Tensor, task: int) -> Tensor:
        return run_backbone(self.network(task), x)

    @torch.no_grad()
    def write_network(self, network: nn.Module, task: int) -> None:
        """Write the parameters and buffers of a finished task into ``network``, a copy of the backbone."""
        held: TaskWeights = self.task_parts(task)
        dealt, own = self.partitioned(held.share), held.tensors
        for name, parameter in network.named_parameters():
            if name in dealt:
                parameter.zero_()
                for other in (*held.share.reads, task):
                    where, values = self._positions_and_values(other, name, parameter.shape)
                    parameter.masked_scatter_(where, values)  # three times as fast as an assignment
            elif name in own:
                parameter.copy_(own[name])
        for site, given in zip(state_sites(network), state_sites(self.backbone), strict=True):
            site.value.copy_(own.get(site.name, given.value))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._network_cache = _NetworkCache()  # the cached network has the old device and type
        return super()._apply(fn, recurse)

    # State ----------------------------------------------------------------------------------------------------

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        self._network_cache = _NetworkCache()
        super()._match_tasks(state)
        shares = {task: share for task in self.tasks if (share := self.share(task)) is not None}
        for task, share in shares.items():
            others = {other for other in shares if other != task and not shares[other].overlaps(share)}
            if len(others) + 1 < len(shares) or not others.issuperset(share.reads):
                raise ValueError(_NO_SHARE)
            if not self.task_parts(task).backbone:  # not saved during this training
                self.heads.finish(task)

    def _fits(self, task: int, saved: Mapping[str, Tensor]) -> bool:
        dealt = saved.get(f"own.{_DEALT}")
        return dealt is not None and self.share(task) == Allocation.decode(dealt) and super()._fits(task, saved)

    def parts_for(self, saved: Mapping[str, Tensor]) -> TaskWeights:
        """Return a finished task's :class:`TaskWeights`, into which the tensors in ``saved`` can be loaded."""
        if _DEALT not in saved:
            raise ValueError("a task of this state has no share: no DisjointModel saved it")
        sites = [site for site in state_sites(self.backbone) if _ENTRIES + _without_dots(site.name) in saved]
        parts = self._own_entries(self.backbone, Allocation.decode(saved[_DEALT]), sites)
        if shapes(parts.state_dict()) != shapes(saved):
            raise ValueError(_NO_SHARE)
        return parts


_NO_SHARE = (
    "a task's part of this state is no share of this backbone, or overlaps another task's share: it was saved with "
    "another backbone, or in the middle of a training; save between tasks"
)


class _NetworkCache:
    """Cache of one finished task's network; not included in copies and saved states of the model."""

    def __init__(self) -> None:
        self._network: nn.Module | None = None
        self._valid_for: Any = None

    def __reduce__(self) -> Any:
        return _NetworkCache, ()

    def network(self, model: DisjointModel, task: int) -> nn.Module:
        """Return a finished task's network, in evaluation mode and without gradients."""
        with torch.inference_mode(False):
            if self._network is None:
                self._network, self._valid_for = model.copied().requires_grad_(False).eval(), None
            if self._valid_for is None or self._valid_for != _tensor_versions(model, task, self._network):
                self._valid_for = None  # the network is invalid if the next line is interrupted
                model.write_network(self._network, task)
                self._valid_for = _tensor_versions(model, task, self._network)
        return self._network


def _tensor_versions(model: DisjointModel, task: int, network: nn.Module) -> Any:
    """Return the task, and ids and versions of all tensors that its network uses, to detect later changes."""
    held: TaskWeights = model.task_parts(task)
    sources = (network, held, *map(model.task_parts, held.share.reads))
    tensors = (tensor for source in sources for tensor in (*source.parameters(), *source.buffers()))
    return task, [(id(tensor), tensor._version) for tensor in tensors]


def _without_dots(name: str) -> str:
    """Return ``name`` with "/" in place of ".", because names of a module's own tensors can't contain dots."""
    return name.replace(".", "/")
