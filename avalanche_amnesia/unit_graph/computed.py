"""Tensors by name that are computed when they are asked for, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor


class Computed(Mapping[str, Tensor]):
    """Name → tensor, computed each time: one for every weight of a network would be as large as the network."""

    def __init__(self, names: Collection[str], compute: Callable[[str], Tensor]) -> None:
        self._names, self._compute = names, compute

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
