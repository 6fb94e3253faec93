"""Calls of modules that the user declared frozen or task-owned: each is one node of the graph, whatever is inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from avalanche_amnesia.unit_graph.findings import ModelError

if TYPE_CHECKING:
    from avalanche_amnesia.unit_graph.inputs import Inputs

_LIBRARY = torch.library.Library("amnesia", "FRAGMENT")
_LIBRARY.define("declared(Tensor[] tensors, int number) -> Tensor[]")
DECLARED = torch.ops.amnesia.declared.default
_BATCHES = (2, 3)
_open: list[DeclaredCalls] = []


@dataclass
class DeclaredCall:
    """One call of a declared module.

    Attributes:
        name: of the module.
        arguments: of its forward, ``(args, kwargs)`` with the number of the tensor in the place of each tensor.
    """

    name: str
    arguments: Any


class DeclaredCalls:
    """Stand-ins for declared modules during an export.

    What a module returns is found by running the backbone on numbers, once for each of two sizes of batch: what is
    inside may be anything, control flow on values too.

    Args:
        results: name of a module → what its calls returned, in order, for either size of batch.
    """

    def __init__(self, results: dict[str, list[list[Any]]]) -> None:
        self._results, self._count = results, dict.fromkeys(results, 0)
        self.seen: list[DeclaredCall] = []
        self._returned: list[list[Any]] = []

    @classmethod
    @contextmanager
    def standing_in(
        cls, backbone: nn.Module, names: Collection[str], root: nn.Module, inputs: Inputs, training: bool
    ) -> Iterator[DeclaredCalls]:
        """Put stand-ins into the places of the modules' forwards; who restores the modules takes them out again."""
        modules = {name: backbone.get_submodule(name) for name in names if name in dict(backbone.named_modules())}
        calls = cls(_observed(root, modules, inputs) if modules else {})
        for name, module in modules.items():
            vars(module)["forward"] = calls._stand_in(name)
        _open.append(calls)
        try:
            yield calls
        finally:
            _open.pop()

    def _stand_in(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, _ = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            places = iter(range(len(tensors)))
            arguments = pytree.tree_map(
                lambda leaf: _Place(next(places)) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            number = len(self.seen)
            self.seen.append(DeclaredCall(name, arguments))
            at = self._count[name] % max(1, len(self._results[name][0]))
            self._count[name] += 1
            like = self._results[name][0][at]
            self._returned.append([of_batch[at] for of_batch in self._results[name]])
            found = iter(DECLARED(tensors, number))
            return pytree.tree_map(lambda leaf: next(found) if isinstance(leaf, Tensor) else leaf, like)

        return forward

    def made(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        """Tensors of the shapes that a call returns."""
        first, second = (
            [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            for result in self._returned[number]
        )
        batch = tensors[0].shape[0]
        results = []
        for a, b in zip(first, second, strict=True):
            shape = [_size(x, y, batch) for x, y in zip(a.shape, b.shape, strict=True)]
            results.append(tensors[0].new_empty(shape, dtype=a.dtype))
        return results


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands among the arguments of a call."""

    number: int


def filled_in(tree: Any, tensors: Any) -> Any:
    """Arguments of a call with tensors, or nodes, in their places."""
    return pytree.tree_map(
        lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, _Place),
    )


def _size(of_two: int, of_three: int, batch: Any) -> Any:
    if of_two == of_three:
        return of_two
    each, rest = divmod(of_two, _BATCHES[0])
    if rest or each * _BATCHES[1] != of_three:
        raise ModelError(f"a declared module returns {of_two} entries for 2 samples and {of_three} for 3")
    return batch * each


@torch.library.register_fake("amnesia::declared", lib=_LIBRARY)
def _fake(tensors: list[Tensor], number: int) -> list[Tensor]:
    return _open[-1].made(tensors, number)


@torch.no_grad()
def _observed(root: nn.Module, modules: dict[str, nn.Module], inputs: Inputs) -> dict[str, list[list[Any]]]:
    twin = copy.deepcopy(root).eval()  # running it may change its buffers
    results: dict[str, list[list[Any]]] = {name: [] for name in modules}
    hooks = [
        twin.get_submodule(f"backbone.{name}").register_forward_hook(
            lambda module, args, result, name=name: results[name][-1].append(result)
        )
        for name in modules
    ]
    for batch in _BATCHES:
        for of_module in results.values():
            of_module.append([])
        twin(inputs.tensors(inputs.batch(batch)))
    for hook in hooks:
        hook.remove()
    return results
