"""Traces of backbones that all pytest workers share during a session, because torch.export is slow.

A shared trace equals the worker's own one: it depends on the network's structure only, and pickle does not change a
masked model (``tests/promises/test_any_network.py``).
"""

import hashlib
import operator
import pickle
import sys
import types
from pathlib import Path
from uuid import uuid4

from avalanche_amnesia.unit_graph.tracing import Cache


class SharedTraces(Cache):
    """The traces of this worker in memory, and of all workers in the session's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(256)
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def get(self, structure):
        found, file = super().get(structure), self._file(structure)
        if found is None and file is not None and file.exists():
            found = pickle.loads(file.read_bytes())
            super().put(structure, found)
        return found

    def put(self, structure, result):
        super().put(structure, result)
        if (file := self._file(structure)) is not None:
            written = file.with_name(uuid4().hex)
            written.write_bytes(pickle.dumps(result))
            written.replace(file)

    def _file(self, structure) -> Path | None:
        """Return the trace's file, or None if the same names could be other objects in another worker."""
        try:
            return None if structure is None else self._folder / hashlib.sha256(_text(structure).encode()).hexdigest()
        except _NotShared:
            return None


class _NotShared(Exception):
    """A class or function without a unique name."""


def _named(module: str, name: str):
    """Return the object under a module's name; a class made in a call may have the name of another one."""
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _text(part) -> str:
    if isinstance(part, (tuple, list)):
        return f"({','.join(map(_text, part))})"
    if isinstance(part, frozenset):
        return f"{{{','.join(sorted(map(_text, part)))}}}"
    if isinstance(part, (type, types.FunctionType, types.BuiltinFunctionType)) and part is not type(None):
        name = f"{part.__module__}.{part.__qualname__}"
        if part.__module__ != "__main__" and _named(part.__module__, part.__qualname__) is part:
            return name
        # The place in the module determines a lambda without values of its own.
        plain = part.__qualname__ == "<lambda>" and not part.__closure__ and not part.__defaults__
        if part.__module__ == "__main__" or not plain:
            raise _NotShared
        return f"{name}{[*part.__code__.co_positions()]}"
    return repr(part)
