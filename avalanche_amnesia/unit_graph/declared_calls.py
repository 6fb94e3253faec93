"""Export of modules that the user declares frozen or task-owned (a copy per task): each call is one graph node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from avalanche_amnesia.unit_graph.backbones import Inputs, first_float, run_copied
from avalanche_amnesia.unit_graph.findings import ModelError

_LIBRARY = torch.library.Library("amnesia", "FRAGMENT")
_LIBRARY.define("declared(Tensor[] tensors, SymInt[] sizes, Tensor[] like, int number) -> Tensor[]")
# not by register_fake(), which searches all modules for its caller at import
_LIBRARY.impl("declared", lambda tensors, sizes, like, number: [torch.empty_like(each) for each in like], "Meta")
DECLARED = torch.ops.amnesia.declared.default
_BATCHES = (2, 3)


class DeclaredCalls:
    """Placeholders for modules declared frozen or task-owned (a copy per task), while torch.export traces a backbone.

    The results of a module are found by running the backbone on real numbers, for two batch sizes. A declared
    module may therefore contain anything, including control flow that depends on values.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        """Name and arguments of each call of a declared module in the current forward."""
        self._results: dict[str, list[list[Any]]] = {}

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Prepare for a new forward pass: clear the recorded module calls, and store an input for its batch size."""
        self.seen, self._first = [], tensors[0]

    def replace_forwards(self, root: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> None:
        """Make each module's ``forward`` a placeholder that torch.export traces as one node; the caller undoes it."""
        if modules:
            self._results = _observe_calls(root, modules, inputs)
        for name, module in modules.items():
            vars(module)["forward"] = partial(self._placeholder_call, name)

    def _placeholder_call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
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
        """Return an empty tensor in the shape of a module's result, inferred from its results for 2 and 3 samples."""
        shape: list[Any] = []
        for two, three in zip(of_two.shape, of_three.shape, strict=True):
            each, rest = divmod(two, _BATCHES[0])
            if two != three and (rest or each * _BATCHES[1] != three):
                raise ModelError(f"a declared module returns {two} entries for 2 samples and {three} for 3")
            shape.append(two if two == three else self._first.shape[0] * each)
        return self._first.new_empty(shape, dtype=of_two.dtype)


def with_nodes(arguments: Any, tensors: Iterator[fx.Node], sizes: Iterator[fx.Node]) -> Any:
    """Return the arguments of a call with graph nodes in place of its tensors and symbolic sizes."""

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(tensors)
        return next(sizes) if isinstance(leaf, torch.SymInt) else leaf

    return pytree.tree_map(fill, arguments)


@torch.no_grad()
def _observe_calls(root: nn.Module, modules: Mapping[str, nn.Module], inputs: Inputs) -> dict[str, list[list[Any]]]:
    """Run the backbone with 2 and with 3 samples, and return the results of each call of each module in ``modules``."""
    results: dict[str, list[list[Any]]] = {name: [] for name in modules}
    inside: list[str] = []

    def observe(name: str, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        inside.append(name)
        try:
            result = forward(*args, **kwargs)
        finally:
            inside.pop()
        if not inside:  # a declared module inside another one is no separate call
            results[name][-1].append(result)
        return result

    for name, module in modules.items():
        vars(module)["forward"] = partial(observe, name, module.forward)
    for batch in _BATCHES:
        for of_module in results.values():
            of_module.append([])
        run_copied(root, torch.clone, (inputs.tensors(inputs.batch(batch, like=first_float(root))),))
    return results
