"""Weight pools: one network whose weights are dealt out, so that no task reads what another one may take with it."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass
from functools import lru_cache
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.bits import same_bits, tensor_hash
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.models.substitutes import kept_tensors, state_sites, unlike
from avalanche_amnesia.models.task_store import TaskModules
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.text_table import text_table
from avalanche_amnesia.unit_graph.backbones import run_on
from avalanche_amnesia.unit_graph.findings import ModelError

_DEALT, _ENTRIES = "dealt", "entries."
"""Names in the state of a task's share: how it was dealt, and in front of the names of its tensors."""

_COPIES = 0.05
"""Of a network's parameters, for copies of its smallest layers; chosen on validation images."""

_PERMUTATIONS = 32
"""Permutations of a row's entries that are drawn for a tensor; each row takes one of them, turned by a number."""


@dataclass(frozen=True)
class Share:
    """Entries of every tensor that a task owns, and the tasks whose entries it reads beside its own.

    The partition of the entries follows from (seed, tensor name) and takes no memory: it is made again where it is
    needed.

    Attributes:
        seed: of the partition.
        slots: disjoint parts that every tensor is cut into.
        slot: the one that the task owns, from 0.
        reads: tasks that may never be unlearned, whose entries it reads and never changes.
    """

    seed: int
    slots: int
    slot: int
    reads: tuple[int, ...] = ()

    def encoded(self) -> Tensor:
        """The share as numbers, int64 ``(3 + tasks read,)``."""
        *numbers, reads = astuple(self)
        return torch.tensor([*numbers, *reads], dtype=torch.int64)

    @classmethod
    def decoded(cls, numbers: Tensor) -> Self:
        """The share that :meth:`encoded` wrote; a ValueError for numbers that are none."""
        found = numbers.tolist() if numbers.dtype == torch.int64 and numbers.dim() == 1 else []
        if len(found) < 3 or not 0 <= found[2] < found[1]:
            raise ValueError(f"{found} is no share: seed, slots, slot, tasks that are read")
        return cls(found[0], found[1], found[2], tuple(found[3:]))

    def overlaps(self, other: Self) -> bool:
        """Tell whether an entry may lie in both."""
        return (self.seed, self.slots) != (other.seed, other.slots) or self.slot == other.slot

    def deals(self, shape: torch.Size) -> bool:
        """Tell whether a tensor is dealt to the slots; each task has a copy of its own of any other one.

        One is not that has a single row (biases, norms, a token, an embedding of positions), or rows with fewer entries
        than there are slots, in which outputs would have no input left: such tensors are small.
        """
        return len(shape) > 1 and shape[0] > 1 and prod(shape[1:]) >= self.slots

    def owned(self, name: str, shape: torch.Size) -> Tensor:
        """Entries of a tensor that is dealt, bool of its shape: of each row ``n_in / slots``, rounded up or down."""
        codes, rows, turns = _partition(self.seed, name, shape[0], prod(shape[1:]), self.slots)
        wanted = ((self.slot - turns) % self.slots).to(codes.dtype)
        return codes.index_select(0, rows).eq_(wanted[:, None]).view(torch.bool).reshape(shape)


@lru_cache(maxsize=1024)  # small: of a matrix a few rows
def _partition(seed: int, name: str, n_rows: int, n_in: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of every entry in some permutations of a row; which of them each row takes, and turned by what."""
    # RandomState, whose stream is frozen for good: a state that was saved is read by other versions too.
    random = np.random.RandomState(derive_seed(seed, "shares", name) % 2**32)
    ranks = np.stack([random.permutation(n_in) for _ in range(min(_PERMUTATIONS, n_rows))])
    rows, turns = random.randint(len(ranks), size=n_rows), random.randint(slots, size=n_rows)
    kind = torch.uint8 if slots <= 256 else torch.int32
    return torch.from_numpy(ranks % slots).to(kind), torch.from_numpy(rows), torch.from_numpy(turns)


class TaskShare(nn.Module):
    """Possessions of one task: while it trains a whole network, once it is finished only the entries that it owns.

    Args:
        entries: the network; or a tree of modules without a forward that holds its tensors under their names.
        dealt: what :meth:`Share.encoded` wrote; None: nothing is dealt yet.

    Attributes:
        backbone: hashes of the backbone's tensors when the task's training began; empty for a finished task.
    """

    def __init__(self, entries: nn.Module, dealt: Tensor | None = None) -> None:
        super().__init__()
        self.entries = entries
        self.dealt: Tensor
        self.register_buffer(_DEALT, dealt)
        self.backbone: dict[str, str] = {}

    @property
    def share(self) -> Share:
        """Share that was dealt to the task."""
        return Share.decoded(self.dealt)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, by their names in the backbone."""
        return dict((*self.entries.named_parameters(), *self.entries.named_buffers()))


class DisjointModel(MultiHeadModel):
    """Any network whose weights are dealt out to disjoint shares, one for each task, and one head per task.

    A task reads only its own share of every layer's weights, and those of tasks that may never be unlearned; all others
    are +0 for it. Biases, norms, buffers and heads are the task's own, and so are the smallest layers (:meth:`dealt`).
    So no task's training or features depend on a task that may go. Nothing is traced: ``forward`` may be anything.

    The backbone stays as it was given. Its values are those from which every share begins, scaled to the share, and it
    stands in for tasks that the model does not have. A parameter that does not require gradients (of a pretrained
    network) is dealt to nobody: every task reads it as it is.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``; it must be possible to copy it.
        n_features: width of the features; by default ``backbone.features``, where that is an integer.

    Raises:
        ModelError: if the width of the features is not known, or the backbone can't be copied.
    """

    task_containers = ("heads", "shares")
    features_per_task = True
    state_per_task = True
    isolates = True

    def __init__(self, backbone: nn.Module, n_features: int | None = None) -> None:
        super().__init__(backbone, n_features)
        self.shares = TaskModules()
        self._learning = frozenset(name for name, p in backbone.named_parameters() if p.requires_grad)
        self._opened = _Opened()
        self.copied()  # raises where that can't be done

    # Shares ---------------------------------------------------------------------------------------------------

    def share(self, task: int) -> Share | None:
        """The share of a task; None where it has none yet."""
        held: TaskShare | None = self.shares.get(task)
        return None if held is None or held.dealt is None else held.share

    def tasks_read(self, task: int) -> Sequence[int]:
        """Other tasks without which a finished task has no network."""
        share = self.share(task)
        return () if share is None else share.reads

    def dealt(self, share: Share) -> dict[str, nn.Parameter]:
        """Parameters of the backbone of which a task owns only its share, by name; of all others it has copies.

        Those are what :meth:`Share.deals` leaves out, and the smallest matrices and kernels, as many as make, in copies
        for all slots together, a twentieth of the network: a first convolution has few inputs, of which a share would
        leave too little.
        """
        named = self.backbone.named_parameters()
        learning = {name: parameter for name, parameter in named if name in self._learning}
        room = _COPIES * sum(p.numel() for p in learning.values()) / share.slots
        dealt = {name: p for name, p in learning.items() if share.deals(p.shape)}
        for name, parameter in sorted(dealt.items(), key=lambda item: item[1].numel()):
            room -= parameter.numel()
            if room < 0:
                break
            del dealt[name]
        return dealt

    def describe(self, slots: int) -> str:
        """Table of the backbone's parameters: what becomes of each with so many slots, and how much a task keeps of it.

        Args:
            slots: as of :class:`~avalanche_amnesia.isolation.Pools`, at least 1.
        """
        share = Share(0, checks.whole_number("slots", slots), 0)
        dealt, rows, total = self.dealt(share), [], 0
        for name, parameter in self.backbone.named_parameters():
            n, rule = parameter.numel(), "each task's own"
            if name not in self._learning:
                n, rule = 0, "without gradients: read by all"
            elif name in dealt:
                n, rule = round(n / slots), f"dealt to {slots} slots"
            total += n
            rows.append((name, " × ".join(map(str, parameter.shape)), rule, f"{n:,}"))
        table = text_table(("parameter", "shape", "rule", "per task"), rows)
        return f"{table}\n{total:,} numbers per task, beside its head\n"

    def begins_as(self, name: str) -> str:
        """As the base class's: a task's copy of the backbone begins as that."""
        return re.sub(rf"^shares\.\d+\.{re.escape(_ENTRIES)}", "backbone.", name)

    def free_share(self) -> float:
        """As the base class's: of the weights that are dealt out."""
        shares = {task: share for task in self.tasks if (share := self.share(task)) is not None}
        parameters = self.dealt(next(iter(shares.values()))) if shares else {}
        total = sum(parameter.numel() for parameter in parameters.values())
        owned = sum(
            int(share.owned(name, p.shape).sum()) for share in shares.values() for name, p in parameters.items()
        )
        return 1 - owned / total if total else 1.0

    # Life of a task -------------------------------------------------------------------------------------------

    def adaptation(self, experience: Any) -> None:
        """As the base class's; a task in training gets a copy of the backbone, of which :meth:`deal` leaves a share."""
        super().adaptation(experience)
        if self.training:
            self._opened = _Opened()  # room for the task's own
        for task in map(int, experience.task_labels if self.training else ()):
            if task not in self.shares:
                self.shares[task] = TaskShare(self.copied()).train(self.training)

    def copied(self) -> nn.Module:
        """A copy of the backbone; what does not learn is in common."""
        frozen = {id(p): p for name, p in self.backbone.named_parameters() if name not in self._learning}
        try:
            return deepcopy(self.backbone, frozen)
        except Exception as error:
            raise ModelError(
                f"{type(self.backbone).__name__} can't be copied, and every task trains a copy: {error}. What can't be "
                "copied belongs outside of the backbone; torch.nn.utils.parametrizations has a weight_norm that can"
            ) from error

    @torch.no_grad()
    def deal(self, task: int, share: Share) -> dict[str, Tensor]:
        """Leave a task that begins its share of the network, in its initial values; all else is +0.

        A weight begins as the backbone's, times ``1/√density`` for the share of its tensor that the task reads.

        Args:
            task: its label; it has a head, and no share yet.
            share: its share.

        Returns:
            Name in the backbone → bool tensor of the entries that the task owns, of parameters that are dealt.
        """
        held: TaskShare = self.shares[task]
        held.dealt, held.backbone = share.encoded(), _hashes(self.backbone)
        parameters, owned = dict(held.entries.named_parameters()), {}
        for name, initial in self.dealt(share).items():
            mine = owned[name] = share.owned(name, initial.shape).to(initial.device)
            theirs = [self._entries_of(other, name, initial.shape) for other in share.reads]
            n_read = int(mine.sum()) + sum(len(values) for _, values in theirs)
            parameter = parameters[name]
            parameter.masked_fill_(~mine, 0).mul_((mine.numel() / n_read) ** 0.5)
            for where, values in theirs:
                parameter.masked_scatter_(where, values)
        return owned

    def _entries_of(self, task: int, name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Where a finished task's entries of a parameter lie, and what they hold."""
        held: TaskShare = self.shares[task]
        values = held.entries.get_parameter(name).detach()
        return held.share.owned(name, shape).to(values.device), values

    @torch.no_grad()
    def finish_task(self, task: int) -> None:
        """Keep of a task's network only what is its own, which ends its training.

        Raises:
            ModelError: if forwards changed a tensor that is no parameter, buffer or tensor attribute of a module, or
                the training changed the backbone of which the task has a copy.
        """
        held: TaskShare = self.shares[task]
        now = _hashes(self.backbone)
        moved = sorted(name for name in {*now, *held.backbone} if now.get(name) != held.backbone.get(name))
        if moved:
            raise ModelError(
                f"the training of task {task} changed {moved} of the backbone, of which the task has a copy. Functions "
                "that the backbone holds (hooks, lambdas) and weak references are not copied, and lead to the first "
                "one: let them be methods, or functools.partial of them, and take modules from their arguments"
            )
        changed = unlike(self.backbone, held.entries)
        if changed:
            raise ModelError(
                f"the backbone's forward changes {changed}, or began to keep them: no task can have its own. Make them "
                "buffers, or tensor attributes, that have their final shape when the backbone is wrapped; or keep "
                "nothing"
            )
        share, kept = held.share, nn.Module()
        dealt = self.dealt(share)
        for name, parameter in held.entries.named_parameters():
            if name in self._learning:
                own = parameter.detach()
                if name in dealt:
                    own = own.masked_select(share.owned(name, own.shape).to(own.device))
                _place(kept, name, nn.Parameter(own.clone(), requires_grad=False))
        for site, given in zip(state_sites(held.entries), state_sites(self.backbone), strict=True):
            if not bool(same_bits(site.value.detach(), given.value.detach()).all()):
                _place(kept, site.name, site.value.detach().clone())
        self._keep(task, TaskShare(kept, held.dealt))

    def remove_task(self, task: int) -> None:
        """As the base class's; nothing of the task stays in memory."""
        self._opened = _Opened()
        super().remove_task(task)

    def _keep(self, task: int, share: TaskShare) -> None:
        self.shares[task] = share
        for container in self._containers:
            container.finish(task)

    # Forward --------------------------------------------------------------------------------------------------

    def network(self, task: int) -> nn.Module:
        """The network as a task runs through it; of a finished one good until the next task is asked for."""
        if task not in self.shares:
            return self.backbone
        held: TaskShare = self.shares[task]
        if task in self.shares.unfinished:
            return held.entries
        return self._opened.network(self, task)

    def _features(self, x: Tensor, task: int) -> Tensor:
        return run_on(self.network(task), x)

    @torch.no_grad()
    def write_network(self, network: nn.Module, task: int) -> None:
        """Write a finished task's network into a copy of the backbone."""
        held: TaskShare = self.shares[task]
        dealt, own = self.dealt(held.share), held.tensors
        for name, parameter in network.named_parameters():
            if name in dealt:
                parameter.zero_()
                for other in (*held.share.reads, task):
                    where, values = self._entries_of(other, name, parameter.shape)
                    parameter.masked_scatter_(where, values)  # a third of the time of an assignment
            elif name in own:
                parameter.copy_(own[name])
        for site, given in zip(state_sites(network), state_sites(self.backbone), strict=True):
            site.value.copy_(own.get(site.name, given.value))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._opened = _Opened()  # it has other devices and types
        return super()._apply(fn, recurse)

    # State ----------------------------------------------------------------------------------------------------

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        self._opened = _Opened()
        super()._match_tasks(state)
        saved = {task: _inside(state, f"shares.{task}.") for task in self.tasks}
        for task, held in saved.items():
            if _DEALT not in held and task not in self.shares.unfinished:
                raise ValueError(f"this state has no share of task {task}: it is none of a DisjointModel's")
        shares = {task: Share.decoded(held[_DEALT]) for task, held in saved.items() if _DEALT in held}
        for task, share in shares.items():
            in_training = task in self.shares.unfinished and self.share(task) == share
            if in_training and _shapes(self.shares[task].state_dict()) == _shapes(saved[task]):
                continue  # the middle of its training, loaded again
            room = self._room(share, saved[task])
            others = {other for other in shares if other != task and not shares[other].overlaps(share)}
            fits = _shapes(room.state_dict()) == _shapes(saved[task])
            if not fits or len(others) + 1 < len(shares) or not others.issuperset(share.reads):
                raise ValueError(
                    f"what this state holds of task {task} is no share of this backbone, or no other one than those of "
                    "all other tasks: it was saved with another backbone, or in the middle of a training; save "
                    "between tasks"
                )
            self._keep(task, room)

    def _room(self, share: Share, saved: Mapping[str, Tensor]) -> TaskShare:
        """Room for what a finished task keeps of this backbone, which a state then fills."""
        kept, dealt = nn.Module(), self.dealt(share)
        for name, parameter in self.backbone.named_parameters():
            if name in self._learning:
                owned = [int(share.owned(name, parameter.shape).sum())] if name in dealt else parameter.shape
                _place(kept, name, nn.Parameter(parameter.new_zeros(owned), requires_grad=False))
        for site in state_sites(self.backbone):
            if _ENTRIES + site.name in saved:
                _place(kept, site.name, torch.zeros_like(site.value))
        return TaskShare(kept, share.encoded().to(self._device))


def _inside(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


class _Opened:
    """The network of the finished task that was asked for last: no part of the model, made again where it is needed."""

    def __init__(self) -> None:
        self._network: nn.Module | None = None
        self._holds: Any = None

    def __reduce__(self) -> Any:
        return _Opened, ()

    def network(self, model: DisjointModel, task: int) -> nn.Module:
        """A finished task's network, in evaluation mode, which learns nothing."""
        with torch.inference_mode(False):
            if self._network is None:
                self._network, self._holds = model.copied().requires_grad_(False).eval(), None
            if self._holds is None or self._holds != _versions(model, task, self._network):
                self._holds = None  # interrupted, it holds no task
                model.write_network(self._network, task)
                self._holds = _versions(model, task, self._network)
        return self._network


def _versions(model: DisjointModel, task: int, network: nn.Module) -> Any:
    """Versions of all tensors that a network was made of, and of its own: a forward may write into its buffers."""
    held: TaskShare = model.shares[task]
    sources = (network, held, *(model.shares[other] for other in held.share.reads))
    tensors = (tensor for source in sources for tensor in (*source.parameters(), *source.buffers()))
    return task, [(id(tensor), tensor._version) for tensor in tensors]


def _hashes(backbone: nn.Module) -> dict[str, str]:
    """Name → hash of every tensor of a backbone."""
    return kept_tensors(backbone) | {name: tensor_hash(parameter) for name, parameter in backbone.named_parameters()}


def _place(root: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor under a name with dots, into modules that are made for it."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value)
