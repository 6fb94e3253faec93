"""The rewritten backbone: the user's modules, run by a graph that masks them."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from avalanche_amnesia.models.book import Book


class MaskedBackbone(nn.Module):
    """A backbone with masks, under its own module and parameter names.

    Args:
        backbone: its modules, parameters and buffers are used as they are.
        graphs: rewritten graphs for training mode (True) and evaluation mode (False).
        book: what the walk found.
        classifier: name of a module to leave out.
    """

    def __init__(
        self, backbone: nn.Module, graphs: Mapping[bool, fx.Graph], book: Book, classifier: str | None
    ) -> None:
        super().__init__()
        self._modules = dict(backbone._modules)
        self._parameters = dict(backbone._parameters)
        self._buffers = dict(backbone._buffers)
        self._non_persistent_buffers_set = set(backbone._non_persistent_buffers_set)
        self.training = backbone.training
        self.original = type(backbone).__name__
        if classifier is not None:
            self._replace(classifier)
        for name, index in book.indices.items():
            device = next(backbone.parameters()).device
            self.register_buffer(name, index.to(device), persistent=False)
        self.owned = dict(book.owned)
        self._frozen = tuple(sorted(book.frozen_modules))
        self._sources = {mode: _source(graph) for mode, graph in graphs.items()}
        self._compile()
        self._settle_frozen()  # the modes of all others are the user's

    def _replace(self, classifier: str) -> None:
        """Leave a module out, without touching the user's own object."""
        owner: nn.Module = self
        *path, last = classifier.split(".")
        for part in path:
            inner = owner._modules[part]
            assert inner is not None
            twin = _shallow(inner)
            owner._modules[part] = twin
            owner = twin
        owner._modules[last] = nn.Identity()

    def _compile(self) -> None:
        self._forwards = {mode: _compiled(*source) for mode, source in self._sources.items()}

    def forward(self, x: Tensor, own: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> Tensor:
        """Features ``(batch, features)``.

        Args:
            x: ``(batch, …)``.
            own: the task's own modules, by name.
            masks: layer name → ``(units,)``.
        """
        result: Tensor = self._forwards[self.training](self, x, own, masks)
        return result

    def train(self, mode: bool = True) -> MaskedBackbone:
        """As usual; modules declared frozen stay in evaluation mode: running statistics would move with every task."""
        super().train(mode)
        self._settle_frozen()
        return self

    def _settle_frozen(self) -> None:
        for name in self._frozen:
            self.get_submodule(name).eval()

    def evaluation_with(self, replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> Callable[..., Tensor]:
        """The forward of evaluation mode, called as ``f(self, x, own, masks)``, to be traced again.

        Args:
            replaced: functions that it calls → what it calls in their place.
        """
        return _compiled(*self._sources[False], replaced=replaced)

    def code(self, training: bool = False) -> str:
        """The forward's source, for people."""
        return self._sources[training][0]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_forwards"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()


def _shallow(module: nn.Module) -> nn.Module:
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = dict(module._modules)
    return twin


def _source(graph: fx.Graph) -> tuple[str, dict[str, tuple[str, str | None]]]:
    """A graph's code, and the names it needs as (module, name): such a form can be pickled."""
    code = graph.python_code("self")
    names: dict[str, tuple[str, str | None]] = {}
    for name, value in code.globals.items():
        if value is type(None):
            names[name] = ("types", "NoneType")
        elif isinstance(value, types.ModuleType):
            names[name] = (value.__name__, None)
        elif getattr(value, "__module__", None) and hasattr(value, "__qualname__"):
            names[name] = (value.__module__, value.__qualname__)
        else:
            names[name] = ("", repr(value))
    return code.src, names


def _compiled(
    source: str,
    names: Mapping[str, tuple[str, str | None]],
    replaced: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType({}),
) -> Callable[..., Tensor]:
    scope: dict[str, Any] = {}
    for name, (module, attribute) in names.items():
        if not module:
            scope[name] = {"inf": float("inf"), "nan": float("nan"), "None": None}.get(str(attribute), torch)
            continue
        value: Any = importlib.import_module(module)
        for part in (attribute or "").split(".") if attribute else ():
            value = getattr(value, part)
        scope[name] = replaced.get(value, value) if callable(value) else value
    exec(compile(source, "<masked backbone>", "exec"), scope)
    forward: Callable[..., Tensor] = scope["forward"]
    return forward
