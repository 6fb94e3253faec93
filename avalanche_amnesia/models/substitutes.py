"""A backbone run as it is, untraced, with a task's own tensors and norms put in for the backbone's.

Beside its parameters a backbone may keep tensors: buffers, and attributes of its modules. A moving average, power
iterations, a functional norm on own buffers: what a forward in training mode writes there, all tasks would share. So
every task has its own, which begins as the backbone's; what a task left as it was goes by the backbone's again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia.bits import same_bits, tensor_hash

Place = tuple[dict[str, Any], str]
"""Holder of something (a module's ``_parameters``, ``_buffers`` or attributes), and the name that it has there."""
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Classes of norms of which a task can have copies."""


class Substitutes:
    """Substitutes of one forward, and the way back.

    The backbone's own things are noted before the first of them is replaced: a forward that was interrupted while it
    put them back leaves nothing in their place for good.
    """

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def put(self, others: Sequence[tuple[Place, Any]]) -> Iterator[None]:
        """Put things into their places, for the length of a block."""
        self.take_back()
        self._own = [(*place, place[0][place[1]]) for place, _ in others]
        try:
            for (holder, name), other in others:
                holder[name] = other
            yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Put the backbone's own things back, where a block was left without that."""
        for holder, name, value in self._own:
            holder[name] = value
        self._own = []


def norms_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Norms of a backbone that tasks change, by name: they have parameters that learn, or running statistics."""
    return {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, NORMS) and (any(p.requires_grad for p in module.parameters()) or [*module.buffers()])
    }


class NormCopies:
    """Norms of a backbone as prototypes, which nobody trains, of the copies that its tasks run through."""

    def __init__(self, prototypes: Sequence[nn.Module]) -> None:
        self.prototypes = list(prototypes)
        self._learned = [p.requires_grad for norm in self.prototypes for p in norm.parameters()]
        for norm in self.prototypes:
            norm.requires_grad_(False)

    def begun(self) -> list[nn.Module]:
        """Copies for a task that begins, with the prototypes' values."""
        copies = [deepcopy(norm) for norm in self.prototypes]
        self.set_trainable(copies, True)
        return copies

    def set_trainable(self, copies: Iterable[nn.Module], learn: bool) -> None:
        """Let copies receive gradients, or not; what the backbone's maker had frozen never does."""
        parameters = [parameter for norm in copies for parameter in norm.parameters()]
        for parameter, learned in zip(parameters, self._learned, strict=True):
            parameter.requires_grad_(learn and learned)

    def hold(self) -> None:
        """Put the prototypes into evaluation mode: where they run themselves, they stay as they are."""
        for norm in self.prototypes:
            norm.eval()

    def standing_in(self, copies: Iterable[nn.Module], *, learn: bool = True) -> list[tuple[Place, Any]]:
        """Substitutes during a forward: parameters, statistics and mode of a task's copies."""
        found: list[tuple[Place, Any]] = []
        for prototype, copy in zip(self.prototypes, copies, strict=False):
            found += [((vars(prototype), name), vars(copy)[name]) for name in ("_parameters", "_buffers")]
            found.append(((vars(prototype), "training"), copy.training and learn))
        return found


# Buffers, and attributes that are tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSite:
    """Place where a backbone keeps a tensor."""

    name: str
    module: nn.Module
    is_buffer: bool
    attribute: str

    @property
    def place(self) -> Place:
        """Dictionary that holds the tensor, and its name there."""
        return (self.module._buffers if self.is_buffer else vars(self.module)), self.attribute

    @property
    def value(self) -> Any:
        """The value there now."""
        holder, name = self.place
        return holder.get(name)


class TaskState(nn.Module):
    """One task's tensors for a backbone's sites, by the number of the site; they begin as the backbone's."""

    def __init__(self, sites: Sequence[StateSite]) -> None:
        super().__init__()
        for number, site in enumerate(sites):
            self.register_buffer(str(number), site.value.detach().clone())

    def of(self, number: int) -> Tensor | None:
        """The task's tensor for a site; None where it goes by the backbone's."""
        return self._buffers.get(str(number))

    def drop_unchanged(self, sites: Sequence[StateSite]) -> None:
        """Let go of what is still as the backbone has it."""
        for number, site in enumerate(sites):
            own = self.of(number)
            if own is not None and bool(same_bits(own, site.value.detach().to(own.device)).all()):
                del self._buffers[str(number)]

    def drop_all_but(self, kept: Collection[str], prefix: str) -> None:
        """Let go of all tensors whose names, behind a prefix, are not among some."""
        for name in [name for name in self._buffers if prefix + name not in kept]:
            del self._buffers[name]


class ForwardState:
    """The tensors that a backbone keeps, and those that it began to keep after it was wrapped."""

    def __init__(self, backbone: nn.Module, norms: Collection[nn.Module]) -> None:
        self._backbone = (backbone,)  # a plain container: nobody's submodule
        self.sites = [site for site in state_sites(backbone) if not (site.is_buffer and site.module in set(norms))]
        self._known = {name: tensor_hash(tensor) for name, tensor in self._others()}
        self._reshaped: set[str] = set()

    def standing_in(self, own: TaskState | None, *, learns: bool) -> list[tuple[Place, Tensor]]:
        """Substitutes during a forward: the task's tensors if it learns, copies that are thrown away if not."""
        found = []
        for number, site in enumerate(self.sites):
            mine = None if own is None else own.of(number)
            value = site.value if mine is None else mine
            found.append((site.place, value if learns and mine is not None else value.detach().clone()))
        return found

    def keep(self, own: TaskState) -> None:
        """Keep what a forward put into the places of a task's tensors, while they stand in."""
        for number, site in enumerate(self.sites):
            mine, now = own.of(number), site.value
            if mine is None or now is mine:
                continue
            if isinstance(now, Tensor) and now.shape == mine.shape and now.dtype == mine.dtype:
                mine.copy_(now.detach())
            else:
                self._reshaped.add(site.name)

    def shared(self) -> list[str]:
        """Names of tensors that forwards have changed, or begun to keep, and that no task can have of its own."""
        new = {name for name, now in self._others() if name not in self._known or tensor_hash(now) != self._known[name]}
        return sorted(new | self._reshaped)

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that lies in no site: new attributes, and those in lists, tuples and mappings."""
        known = {site.name for site in self.sites}
        yield from ((name, tensor) for name, tensor in _attributes(self._backbone[0]) if name not in known)


def unlike(given: nn.Module, now: nn.Module) -> list[str]:
    """Names of tensors by which a copy of a backbone differs from it where no task can have its own."""
    # Those in lists and mappings must be as they were; those at a site need the same shape and type.
    held = []
    for module in (given, now):
        sites = {site.name: (site.value.shape, site.value.dtype) for site in state_sites(module)}
        own = {id(parameter) for parameter in module.parameters()}  # a recurrent layer has them in a list too
        others = ((name, t) for name, t in _attributes(module) if name not in sites and id(t) not in own)
        held.append(sites | {name: tensor_hash(tensor) for name, tensor in others})
    return sorted(name for name in {*held[0], *held[1]} if held[0].get(name) != held[1].get(name))


def kept_tensors(model: nn.Module) -> dict[str, str]:
    """Name → hash of every tensor that a model keeps beside its parameters: buffers, and attributes of its modules."""
    found = {name: tensor_hash(buffer) for name, buffer in model.named_buffers()}
    return found | {name: tensor_hash(tensor) for name, tensor in _attributes(model)}


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are attributes of a model's modules, or lie in lists, tuples and mappings that are."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_EVERY_MODULE:
                yield from ((f"{path}.{attribute}{place}".lstrip("."), tensor) for place, tensor in _tensors(value))


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def state_sites(backbone: nn.Module) -> Iterator[StateSite]:
    """Places of the tensors that a backbone keeps beside its parameters, and of which a task can have its own."""
    for path, module in backbone.named_modules():
        for is_buffer, held in ((True, module._buffers), (False, vars(module))):
            for attribute, value in held.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    yield StateSite(f"{path}.{attribute}".lstrip("."), module, is_buffer, attribute)


def _tensors(value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items() if isinstance(item, Tensor))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(list(value)) if isinstance(item, Tensor))
