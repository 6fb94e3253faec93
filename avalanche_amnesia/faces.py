"""Lazy imports of public names; the error for an unknown name suggests a similar name or the right import."""

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import lazy_loader

_PACKAGE = "avalanche_amnesia"
Face = tuple[Callable[[str], object], Callable[[], list[str]], list[str]]


@functools.cache
def face(room: str, file: str) -> Face:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a subpackage, with the names of its ``__init__.pyi``."""
    has_names = Path(file).with_suffix(".pyi").exists()
    found, listed, names = lazy_loader.attach_stub(room, file) if has_names else lazy_loader.attach(room)

    def __getattr__(name: str) -> object:
        if name in names:
            return found(name)
        # ``from room import name`` calls this too, but replaces an AttributeError's message by a generic one.
        asking = sys._getframe(1)
        if asking.f_code.co_name == "__getattr__" and asking.f_back is not None:
            asking = asking.f_back
        imported = asking.f_code.co_name == "_handle_fromlist"
        if name.startswith("__") or importlib.util.find_spec(f"{room}.{name}") is not None:
            raise AttributeError(name)
        raise (ImportError if imported else AttributeError)(_told(room, name, names))

    return __getattr__, listed, names


def _told(room: str, name: str, names: list[str]) -> str:
    from avalanche_amnesia.checks import did_you_mean  # lazy: only an error needs it

    places = _places()
    elsewhere = [place for place in places.get(name, []) if place != room]
    if elsewhere:
        return f"{room} has no {name!r}: write from {elsewhere[0]} import {name}"
    hint = did_you_mean(name, names) or did_you_mean(name, places)
    near = hint.split("'")[1] if hint else ""
    if near and near not in names:
        hint = hint.replace("?", f" of {places[near][0]}?")
    return f"{room} has no {name!r}{hint}"


def _places() -> dict[str, list[str]]:
    """Return, for each public name, the subpackages that export it, those with the shortest path first."""
    root = Path(__file__).parent
    places: dict[str, list[str]] = {}
    for stub in sorted(root.rglob("__init__.pyi"), key=lambda path: (len(path.parts), path)):
        room = ".".join((_PACKAGE, *stub.parent.relative_to(root).parts))
        for node in ast.parse(stub.read_text()).body:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                places.setdefault(alias.asname or alias.name, []).append(room)
    return places
