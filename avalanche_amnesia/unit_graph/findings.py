"""Reasons why a backbone can't be masked, and the errors that report them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

Fix = Callable[[nn.Module], None]


class ModelError(ValueError):
    """Error for a backbone that can't be masked; the message names the module or operation, the reason and a remedy."""


@dataclass(frozen=True)
class Finding:
    """A part of a backbone that can't be masked, with the reason and a remedy.

    Attributes:
        where: the module, parameter or operation.
        reason: why that part can't be masked.
        fix: what the user can do.
        change: the change that :func:`~avalanche_amnesia.fix` makes; None if there is no such change.
    """

    where: str
    reason: str
    fix: str
    change: Fix | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}; {self.fix}"


class Unsupported(Exception):
    """Error that a rule (function that traces one kind of operation) raises for an operation it can't mask.

    Args:
        reason: why the operation can't be masked.
        fix: what the user can do.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def make_bake_fix(name: str) -> Fix:
    """Return a function that replaces the parametrisations of the module ``name`` by its current weights."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(name)
        # torch edits the module's class, which copies of the module share.
        kind = type(module)
        own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, own)
        training = module.training
        module.eval()  # in training mode, a parametrisation would first update its state
        for parameter in list(module.parametrizations):  # type: ignore[arg-type]
            nn.utils.parametrize.remove_parametrizations(module, str(parameter))
        module.train(training)

    return change


def make_drop_fix(names: Sequence[str]) -> Fix:
    """Return a function that removes the parameters in ``names`` from a model, and modules that this leaves empty."""

    def change(model: nn.Module) -> None:
        for name in names:
            owner, _, last = name.rpartition(".")
            delattr(model.get_submodule(owner), last)
        for name, module in reversed(list(model.named_modules())):  # remove modules that are now empty
            gone = any(dropped.startswith(f"{name}.") for dropped in names)
            if name and gone and not list(module.parameters()) and not list(module.children()):
                owner, _, last = name.rpartition(".")
                delattr(model.get_submodule(owner), last)

    return change
