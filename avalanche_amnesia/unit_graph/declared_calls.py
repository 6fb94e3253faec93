"""Calls of modules that the user declared frozen or task-owned: each is one node of the graph, whatever is inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from avalanche_amnesia.unit_graph.backbones import Inputs, first_real, run_copied
from avalanche_amnesia.unit_graph.findings import ModelError

_LIBRARY = torch.library.Library("amnesia", "FRAGMENT")
_LIBRARY.define("declared(Tensor[] tensors, SymInt[] sizes, Tensor[] like, int number) -> Tensor[]")
# register_fake() looks through all modules for its caller, while importing
_LIBRARY.impl("declared", lambda tensors, sizes, like, number: [torch.empty_like(each) for each in like], "Meta")
DECLARED = torch.ops.amnesia.declared.default
_BATCHES = (2, 3)


class DeclaredCalls:
    """Stand-ins for declared modules during an export.

    What a module returns is found by running the backbone on numbers, once for each of two sizes of batch: what is
    inside may be anything, control flow on values too.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        """Name and arguments of each call."""
        self._results: dict[str, list[list[Any]]] = {}

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Note the inputs of a forward that starts: torch.export may run more than one."""
        self.seen, self._first = [], tensors[0]

    def stand_in(self, root: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> None:
        """Put stand-ins into the places of the modules' forwards; who restores the modules takes them out again."""
        if modules:
            self._results = _observed(root, modules, inputs)
        for name, module in modules.items():
            vars(module)["forward"] = partial(self._called, name)

    def _called(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        number, at = len(self.seen), sum(known == name for known, _ in self.seen)
        if any(at >= len(of_batch) for of_batch in self._results[name]):
            raise ModelError(f"declared module {name!r} is called more often in one forward than in another")
        self.seen.append((name, (args, kwargs)))
        given = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        sizes = [leaf for leaf in given if isinstance(leaf, torch.SymInt)]
        few, more = (of_batch[at] for of_batch in self._results[name])
        pairs = zip(pytree.tree_leaves(few), pytree.tree_leaves(more), strict=True)
        like = [self._like(a, b) for a, b in pairs if isinstance(a, Tensor)]
        found = iter(DECLARED([self._first, *tensors], sizes, like, number))
        return pytree.tree_map(lambda leaf: next(found) if isinstance(leaf, Tensor) else leaf, few)

    def _like(self, of_two: Tensor, of_three: Tensor) -> Tensor:
        """A tensor of the shape that a result has for the batch at hand."""
        shape = [_size(a, b, self._first.shape[0]) for a, b in zip(of_two.shape, of_three.shape, strict=True)]
        return self._first.new_empty(shape, dtype=of_two.dtype)


def filled_in(arguments: Any, tensors: Iterator[fx.Node], sizes: Iterator[fx.Node]) -> Any:
    """Arguments of a call with nodes in the places of its tensors and sizes."""

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(tensors)
        return next(sizes) if isinstance(leaf, torch.SymInt) else leaf

    return pytree.tree_map(filled, arguments)


def _size(of_two: int, of_three: int, batch: Any) -> Any:
    if of_two == of_three:
        return of_two
    each, rest = divmod(of_two, _BATCHES[0])
    if rest or each * _BATCHES[1] != of_three:
        raise ModelError(f"a declared module returns {of_two} entries for 2 samples and {of_three} for 3")
    return batch * each


@torch.no_grad()
def _observed(root: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> dict[str, list[list[Any]]]:
    """Results of the modules, call by call, for either size of batch."""
    results: dict[str, list[list[Any]]] = {name: [] for name in modules}
    inside: list[str] = []

    def observed(name: str, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        inside.append(name)
        try:
            result = forward(*args, **kwargs)
        finally:
            inside.pop()
        if not inside:  # a declared module inside of another one is no call of its own
            results[name][-1].append(result)
        return result

    for name, module in modules.items():
        vars(module)["forward"] = partial(observed, name, module.forward)
    for batch in _BATCHES:
        for of_module in results.values():
            of_module.append([])
        run_copied(root, torch.clone, (inputs.tensors(inputs.batch(batch, like=first_real(root))),))
    return results
