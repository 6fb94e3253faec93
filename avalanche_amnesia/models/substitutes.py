"""Substitution of per-task tensors and norms into an untraced backbone during a forward pass.

A backbone may store tensors that are no parameters: buffers, and attributes of its modules (a moving average, power
iterations, a functional norm's statistics). Tasks would share all values that a forward in training mode writes there.
So every task has its own copies, which start as the backbone's; unchanged copies are dropped after the training.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia.bits import same_bits, tensor_hash
from avalanche_amnesia.unit_graph.task_owned import OwnModules

Location = tuple[dict[str, Any], str]
"""Place of a tensor in a module: a dictionary (``_parameters``, ``_buffers`` or attributes), and a key in it."""
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Classes of norms that can be copied per task."""


def norms_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Return the backbone's norms that have trainable parameters or running statistics, as a dict of name to module."""
    return {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, NORMS) and (any(p.requires_grad for p in module.parameters()) or [*module.buffers()])
    }


# Buffers, and attributes that are tensors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSite:
    """Location of a non-parameter tensor in a backbone: a buffer, or an attribute of a module."""

    name: str
    module: nn.Module
    is_buffer: bool
    attribute: str

    @property
    def location(self) -> Location:
        """Return the dictionary that contains the tensor, and the tensor's key in the dictionary."""
        return (self.module._buffers if self.is_buffer else vars(self.module)), self.attribute

    @property
    def value(self) -> Any:
        """Return the current tensor at this site, or None if there is none."""
        holder, name = self.location
        return holder.get(name)


class TaskCopies:
    """Set of a backbone's norms and buffers (``sites``) that are replaced by a task's copies in each forward pass.

    The originals are frozen, and stored before the first is replaced, so that they can be restored even if a forward
    pass was interrupted.
    """

    def __init__(self, backbone: nn.Module, norms: Mapping[str, nn.Module], sites: Iterable[StateSite] = ()) -> None:
        self._backbone = (backbone,)  # a tuple, so that torch does not register a submodule
        self.norms, self.sites = dict(norms), list(sites)
        self._learned = {name: [p.requires_grad for p in norm.parameters()] for name, norm in norms.items()}
        for norm in norms.values():
            norm.requires_grad_(False)
        self._originals: list[tuple[dict[str, Any], str, Any]] = []
        self._known, self._at_sites = tensor_outline(backbone), {site.name for site in state_sites(backbone)}
        self._reshaped: set[str] = set()

    def make_copies(self, saved: Collection[str] | None = None) -> OwnModules | None:
        """Return a new task's copies of norms and tensors (only tensors in ``saved``, if given), or None if empty."""
        if not self.norms and not self.sites:
            return None
        copies = {name: deepcopy(norm) for name, norm in self.norms.items()}
        for name, norm in copies.items():
            for parameter, learned in zip(norm.parameters(), self._learned[name], strict=True):
                parameter.requires_grad_(learned)
        parts = OwnModules(copies)
        if self.sites:
            parts.add_module(_STATE, nn.Module())
        for number, site in enumerate(self.sites):
            if saved is None or f"{_STATE}.{number}" in saved:
                _task_tensors(parts)[str(number)] = site.value.detach().clone()
        return parts

    def drop_unchanged(self, parts: nn.Module | None) -> None:
        """Delete from a task's ``parts`` the tensors that have the same bits as the backbone's, to save memory."""
        own = _task_tensors(parts)
        for number, site in enumerate(self.sites):
            mine = own.get(str(number))
            if mine is not None and bool(same_bits(mine, site.value.detach().to(mine.device)).all()):
                del own[str(number)]

    @contextmanager
    def substitute(
        self,
        parts: Any,
        others: Iterable[tuple[Location, Any]] = (),
        *,
        learns: bool,
        norms_learn: bool = True,
    ) -> Iterator[None]:
        """Replace the backbone's norm layers, buffers and tensor attributes by a task's own in a ``with`` block.

        Without ``parts``, a task's copies, the original norms run in evaluation mode. ``others``: further places in the
        backbone, with the values to set there. Unless the task ``learns``, its tensors are copied before.
        ``norms_learn``: whether norms in training mode may change the task's statistics.
        """
        self.restore()
        substitutes, own = [*others], _task_tensors(parts)
        for name, norm in self.norms.items():
            copy = norm if parts is None else parts[name]
            substitutes += [((vars(norm), held), vars(copy)[held]) for held in ("_parameters", "_buffers")]
            substitutes.append(((vars(norm), "training"), parts is not None and copy.training and norms_learn))
        for number, site in enumerate(self.sites):
            mine = own.get(str(number))
            value = site.value if mine is None else mine
            substitutes.append((site.location, value if learns and mine is not None else value.detach().clone()))
        self._originals = [(*place, place[0][place[1]]) for place, _ in substitutes]
        try:
            for (holder, name), value in substitutes:
                holder[name] = value
            yield
            if learns:
                self._save_to_task(own)
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the backbone's original norms and tensors after a substitution; do nothing if there was none."""
        for holder, name, value in self._originals:
            holder[name] = value
        self._originals = []

    def _save_to_task(self, own: Mapping[str, Tensor]) -> None:
        """Copy buffers that a forward pass has changed in the backbone back into the task's copies ``own``."""
        for number, site in enumerate(self.sites):
            mine, now = own.get(str(number)), site.value
            if mine is None or now is mine:
                continue
            if isinstance(now, Tensor) and now.shape == mine.shape and now.dtype == mine.dtype:
                mine.copy_(now.detach())
            else:
                self._reshaped.add(site.name)

    def changed_tensors(self) -> list[str]:
        """Return the names of tensors that forward passes changed or created but that can't be copied per task."""
        now = tensor_outline(self._backbone[0])
        changed = {name for name, value in now.items() if self._known.get(name) != value} - self._at_sites
        return sorted(changed | self._reshaped)


_STATE = "/state"
"""Name of the submodule for a task's tensors besides its norms; no module of a backbone can have this name."""


def _task_tensors(parts: Any) -> dict[str, Any]:
    """Return the dict with a task's copies of backbone buffers (by index in ``TaskCopies.sites``), or an empty one."""
    return parts._modules[_STATE]._buffers if parts is not None and _STATE in parts._modules else {}


def tensor_outline(model: nn.Module) -> dict[str, Any]:
    """Return each non-parameter tensor's shape and dtype, by name, or its hash if tasks can't have copies of it."""
    sites = {site.name: (site.value.shape, site.value.dtype) for site in state_sites(model)}
    own = {id(parameter) for parameter in model.parameters()}  # a recurrent layer has them in a list too
    others = ((name, tensor) for name, tensor in _attributes(model) if name not in sites and id(tensor) not in own)
    return sites | {name: tensor_hash(tensor) for name, tensor in others}


def hash_tensors(model: nn.Module, parameters: Iterable[tuple[str, Tensor]] = ()) -> dict[str, str]:
    """Return a dict of name to hash for a model's buffers and tensor attributes, and for the given ``parameters``."""
    return {name: tensor_hash(tensor) for name, tensor in (*model.named_buffers(), *_attributes(model), *parameters)}


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor for each tensor attribute of a model's modules, also in lists, tuples and dictionaries."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_EVERY_MODULE:
                yield from ((f"{path}.{attribute}{place}".lstrip("."), tensor) for place, tensor in _tensors_in(value))


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def state_sites(backbone: nn.Module) -> Iterator[StateSite]:
    """Yield a :class:`StateSite` for each non-parameter tensor of a backbone that can be copied per task."""
    for path, module in backbone.named_modules():
        for is_buffer, held in ((True, module._buffers), (False, vars(module))):
            for attribute, value in held.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    yield StateSite(f"{path}.{attribute}".lstrip("."), module, is_buffer, attribute)


def _tensors_in(value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items() if isinstance(item, Tensor))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(list(value)) if isinstance(item, Tensor))
