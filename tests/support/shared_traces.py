"""Traces of backbones that pytest's workers share for the length of a session: torch.export takes most of some tests.

What a worker finds in the folder is what it would have found itself: a trace depends on its structure alone, and a
masked model is the same behind pickle (``tests/promises/test_any_network.py``).
"""

import hashlib
import operator
import pickle
import sys
import types
from pathlib import Path
from uuid import uuid4

from avalanche_amnesia.unit_graph.tracing import Known


class SharedTraces(Known):
    """The traces of this worker, and those of all workers in a folder.

    Args:
        folder: of the session.
    """

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
        file = self._file(structure)
        if file is not None:
            written = file.with_name(uuid4().hex)
            written.write_bytes(pickle.dumps(result))
            written.replace(file)

    def _file(self, structure) -> Path | None:
        """Its file; None where another worker could mean something else by the same names."""
        try:
            return None if structure is None else self._folder / hashlib.sha256(_told(structure).encode()).hexdigest()
        except _OfOneWorker:
            return None


class _OfOneWorker(Exception):
    """A class or function that has no name of its own."""


def _named(module: str, name: str):
    """What a name of a module stands for there: classes that are made in a call may bear one that is another's."""
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _told(part) -> str:
    if isinstance(part, (tuple, list)):
        return f"({','.join(map(_told, part))})"
    if isinstance(part, frozenset):
        return f"{{{','.join(sorted(map(_told, part)))}}}"
    if isinstance(part, (type, types.FunctionType, types.BuiltinFunctionType)) and part is not type(None):
        if part.__module__ == "__main__" or _named(part.__module__, part.__qualname__) is not part:
            raise _OfOneWorker
        return f"{part.__module__}.{part.__qualname__}"
    return repr(part)
