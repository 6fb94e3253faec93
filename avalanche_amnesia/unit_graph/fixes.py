"""Changes that ``fix`` makes to a model, one function per kind of finding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from avalanche_amnesia.unit_graph.findings import Fix


def bake_in(name: str) -> Fix:
    """Take the parametrisations of a module out; its weights keep the values that they compute now."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(name)
        # torch takes the parametrisation out of the module's class, which copies of the module share.
        kind = type(module)
        own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, own)
        training = module.training
        module.eval()  # in training they would take a step of their own first
        for parameter in list(module.parametrizations):  # type: ignore[arg-type]
            nn.utils.parametrize.remove_parametrizations(module, str(parameter))
        module.train(training)

    return change


def drop(names: Sequence[str]) -> Fix:
    """Remove parameters that nothing reads, and modules of which nothing is left."""

    def change(model: nn.Module) -> None:
        for name in names:
            owner, _, last = name.rpartition(".")
            delattr(model.get_submodule(owner), last)
        for name, module in reversed(list(model.named_modules())):  # modules of which nothing is left
            gone = any(dropped.startswith(f"{name}.") for dropped in names)
            if name and gone and not list(module.parameters()) and not list(module.children()):
                owner, _, last = name.rpartition(".")
                delattr(model.get_submodule(owner), last)

    return change
