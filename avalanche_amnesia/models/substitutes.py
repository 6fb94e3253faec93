"""Substitutes for a backbone's own tensors and norms while it runs, untraced."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Place = tuple[dict[str, Any], str]
"""Holder of something (a module's ``_parameters``, ``_buffers`` or attributes), and the name that it has there."""


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
