"""Calls of modules that the user declared frozen or task-owned: each is one node of the graph, whatever is inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from avalanche_amnesia.unit_graph.backbones import Inputs, first_real, run_copied
from avalanche_amnesia.unit_graph.findings import ModelError

_LIBRARY = torch.library.Library("amnesia", "FRAGMENT")
_LIBRARY.define("declared(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")
DECLARED = torch.ops.amnesia.declared.default
_BATCHES = (2, 3)
_open: list[DeclaredCalls] = []


@dataclass
class DeclaredCall:
    """One call of a declared module."""

    name: str
    arguments: Any


class DeclaredCalls:
    """Stand-ins for declared modules during an export.

    What a module returns is found by running the backbone on numbers, once for each of two sizes of batch: what is
    inside may be anything, control flow on values too.
    """

    def __init__(self) -> None:
        self.seen: list[DeclaredCall] = []
        self._results: dict[str, list[list[Any]]] = {}

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Note the inputs of a forward that starts: torch.export may run more than one."""
        self.seen, self._first = [], tensors[0]
        self._returned: list[list[Any]] = []
        self._count = dict.fromkeys(self._results, 0)

    @contextmanager
    def standing_in(self, root: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> Iterator[None]:
        """Put stand-ins into the places of the modules' forwards; who restores the modules takes them out again."""
        if modules:
            self._results = _observed(root, modules, inputs)
        for name, module in modules.items():
            vars(module)["forward"] = self._stand_in(name)
        _open.append(self)
        try:
            yield
        finally:
            _open.pop()

    def _stand_in(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
            places = {id(leaf): _Place(number) for number, leaf in enumerate((*tensors, *sizes))}
            arguments = pytree.tree_map(lambda leaf: places.get(id(leaf), leaf), (args, kwargs))
            number, at = len(self.seen), self._count[name]
            self._count[name] += 1
            if any(at >= len(of_batch) for of_batch in self._results[name]):
                raise ModelError(f"declared module {name!r} is called more often in one forward than in another")
            self.seen.append(DeclaredCall(name, arguments))
            self._returned.append([of_batch[at] for of_batch in self._results[name]])
            found = iter(DECLARED([self._first, *tensors], sizes, number))
            like = self._results[name][0][at]
            return pytree.tree_map(lambda leaf: next(found) if isinstance(leaf, Tensor) else leaf, like)

        return forward

    def made(self, first: Tensor, number: int) -> list[Tensor]:
        """Tensors of the shapes that a call returns."""
        few, more = (
            [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            for result in self._returned[number]
        )
        results = []
        for a, b in zip(few, more, strict=True):
            shape = [_size(x, y, first.shape[0]) for x, y in zip(a.shape, b.shape, strict=True)]
            results.append(first.new_empty(shape, dtype=a.dtype))
        return results


@dataclass(frozen=True)
class _Place:
    """Place of a tensor, or of a size, among the arguments of a call."""

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


def _fake(tensors: list[Tensor], sizes: list[Any], number: int) -> list[Tensor]:
    return _open[-1].made(tensors[0], number)


_LIBRARY.impl("declared", _fake, "Meta")  # register_fake() looks through all modules for its caller, while importing


@torch.no_grad()
def _observed(root: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> dict[str, list[list[Any]]]:
    """Results of the modules, call by call, for either size of batch."""
    results: dict[str, list[list[Any]]] = {name: [] for name in modules}
    inside: list[str] = []

    def observe(name: str, module: nn.Module) -> None:
        forward = module.forward

        def observed(*args: Any, **kwargs: Any) -> Any:
            inside.append(name)
            try:
                result = forward(*args, **kwargs)
            finally:
                inside.pop()
            if not inside:  # a declared module inside of another one is no call of its own
                results[name][-1].append(result)
            return result

        vars(module)["forward"] = observed

    for name, module in modules.items():
        observe(name, module)
    for batch in _BATCHES:
        for of_module in results.values():
            of_module.append([])
        run_copied(root, torch.clone, (inputs.tensors(inputs.batch(batch, like=first_real(root))),))
    return results
