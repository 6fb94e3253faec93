"""Substitution of per-task tensors and norms into an untraced backbone during a forward pass.

A backbone may store tensors that are no parameters: buffers, and attributes of its modules (a moving average, power
iterations, a functional norm's statistics). Tasks would share all values that a forward in training mode writes there.
So every task has its own copies, which start as the backbone's; unchanged copies are dropped after the training.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia.bits import same_bits, tensor_hash
from avalanche_amnesia.unit_graph.task_owned import OwnModules

Place = tuple[dict[str, Any], str]
"""A dictionary (a module's ``_parameters``, ``_buffers`` or attributes), and a key in it."""
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Classes of norms that can be copied per task."""


class Substitutes:
    """Replaces parts of a backbone during one forward pass, and restores them.

    It stores all original parts before it replaces the first, so it can restore them even if a forward pass was
    interrupted.
    """

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def put(self, others: Sequence[tuple[Place, Any]]) -> Iterator[None]:
        """Replace the values at some places for the duration of a ``with`` block."""
        self.take_back()
        self._own = [(*place, place[0][place[1]]) for place, _ in others]
        try:
            for (holder, name), other in others:
                holder[name] = other
            yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Restore the backbone's original values; does nothing if they are already restored."""
        for holder, name, value in self._own:
            holder[name] = value
        self._own = []


def norms_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Return the backbone's norms, by name, with trainable parameters or running statistics."""
    return {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, NORMS) and (any(p.requires_grad for p in module.parameters()) or [*module.buffers()])
    }


class NormCopies:
    """Norms of a backbone by name, frozen, as prototypes of the tasks' copies."""

    def __init__(self, prototypes: Mapping[str, nn.Module]) -> None:
        self.prototypes = dict(prototypes)
        self._learned = {name: [p.requires_grad for p in norm.parameters()] for name, norm in prototypes.items()}
        for norm in self.prototypes.values():
            norm.requires_grad_(False)

    def begun(self) -> OwnModules:
        """Return copies for a new task, with the prototypes' values."""
        copies = {name: deepcopy(norm) for name, norm in self.prototypes.items()}
        for name, norm in copies.items():
            for parameter, learned in zip(norm.parameters(), self._learned[name], strict=True):
                parameter.requires_grad_(learned)
        return OwnModules(copies)

    def hold(self) -> None:
        """Put the prototypes into evaluation mode, so that running them does not change their statistics."""
        for norm in self.prototypes.values():
            norm.eval()

    def standing_in(self, copies: OwnModules | None, *, learn: bool = True) -> list[tuple[Place, Any]]:
        """Return the substitutes for a forward pass: parameters, statistics and mode of a task's copies."""
        found: list[tuple[Place, Any]] = []
        if copies is None:
            return found
        for name, prototype in self.prototypes.items():
            copy = copies[name]
            found += [((vars(prototype), held), vars(copy)[held]) for held in ("_parameters", "_buffers")]
            found.append(((vars(prototype), "training"), copy.training and learn))
        return found


# Buffers, and attributes that are tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSite:
    """Place of a tensor in a backbone: a buffer, or an attribute of a module."""

    name: str
    module: nn.Module
    is_buffer: bool
    attribute: str

    @property
    def place(self) -> Place:
        """The dictionary with the tensor, and its key."""
        return (self.module._buffers if self.is_buffer else vars(self.module)), self.attribute

    @property
    def value(self) -> Any:
        """The current value."""
        holder, name = self.place
        return holder.get(name)


class TaskState(nn.Module):
    """One task's copies of the tensors at a backbone's sites, by the number of the site."""

    def __init__(self, sites: Sequence[StateSite]) -> None:
        super().__init__()
        for number, site in enumerate(sites):
            self.register_buffer(str(number), site.value.detach().clone())

    def of(self, number: int) -> Tensor | None:
        """Return the task's tensor for a site, or None if it uses the backbone's."""
        return self._buffers.get(str(number))

    def drop_unchanged(self, sites: Sequence[StateSite]) -> None:
        """Delete tensors that are equal to the backbone's."""
        for number, site in enumerate(sites):
            own = self.of(number)
            if own is not None and bool(same_bits(own, site.value.detach().to(own.device)).all()):
                del self._buffers[str(number)]

    def drop_all_but(self, kept: Collection[str], prefix: str) -> None:
        """Delete all tensors except those whose names, with the prefix, are in ``kept``."""
        for name in [name for name in self._buffers if prefix + name not in kept]:
            del self._buffers[name]


class ForwardState:
    """Non-parameter tensors of a backbone: sites with a copy per task, and tensors that all tasks must share."""

    def __init__(self, backbone: nn.Module, norms: Collection[nn.Module]) -> None:
        self._backbone = (backbone,)  # a tuple, so that torch does not register a submodule
        self.sites = [site for site in state_sites(backbone) if not (site.is_buffer and site.module in set(norms))]
        self._known = {name: tensor_hash(tensor) for name, tensor in self._others()}
        self._reshaped: set[str] = set()

    def standing_in(self, own: TaskState | None, *, learns: bool) -> list[tuple[Place, Tensor]]:
        """Return the substitutes for a forward pass: the task's tensors if it learns, else temporary copies."""
        found = []
        for number, site in enumerate(self.sites):
            mine = None if own is None else own.of(number)
            value = site.value if mine is None else mine
            found.append((site.place, value if learns and mine is not None else value.detach().clone()))
        return found

    def keep(self, own: TaskState) -> None:
        """Copy the values written by a forward pass to the task's tensors, before the substitution ends."""
        for number, site in enumerate(self.sites):
            mine, now = own.of(number), site.value
            if mine is None or now is mine:
                continue
            if isinstance(now, Tensor) and now.shape == mine.shape and now.dtype == mine.dtype:
                mine.copy_(now.detach())
            else:
                self._reshaped.add(site.name)

    def shared(self) -> list[str]:
        """Return names of tensors that forward passes changed or created, and that can't be copied per task."""
        new = {name for name, now in self._others() if name not in self._known or tensor_hash(now) != self._known[name]}
        return sorted(new | self._reshaped)

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor outside the sites: in new attributes, lists, tuples and mappings."""
        known = {site.name for site in self.sites}
        yield from ((name, tensor) for name, tensor in _attributes(self._backbone[0]) if name not in known)


def unlike(given: nn.Module, now: nn.Module) -> list[str]:
    """Return names of tensors that differ between a backbone and its copy, except for values at its sites."""
    # Tensors in lists and mappings must be unchanged; tensors at a site need the same shape and type.
    held = []
    for module in (given, now):
        sites = {site.name: (site.value.shape, site.value.dtype) for site in state_sites(module)}
        own = {id(parameter) for parameter in module.parameters()}  # a recurrent layer has them in a list too
        others = ((name, t) for name, t in _attributes(module) if name not in sites and id(t) not in own)
        held.append(sites | {name: tensor_hash(tensor) for name, tensor in others})
    return sorted(name for name in {*held[0], *held[1]} if held[0].get(name) != held[1].get(name))


def kept_tensors(model: nn.Module) -> dict[str, str]:
    """Return name → hash of every tensor of a model except its parameters: buffers, and attributes of modules."""
    found = {name: tensor_hash(buffer) for name, buffer in model.named_buffers()}
    return found | {name: tensor_hash(tensor) for name, tensor in _attributes(model)}


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in attributes of a model's modules, also those inside lists, tuples and mappings."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_EVERY_MODULE:
                yield from ((f"{path}.{attribute}{place}".lstrip("."), tensor) for place, tensor in _tensors(value))


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def state_sites(backbone: nn.Module) -> Iterator[StateSite]:
    """Yield the sites of a backbone: non-parameter tensors that can be copied per task."""
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
