"""Convert the model and the plugins of a strategy to values of a saved state, and back."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from avalanche_amnesia.models.task_store import TaskStore, register_all
from avalanche_amnesia.saving.encoding import OwnFile, encode
from avalanche_amnesia.saving.strategy_settings import own_settings
from avalanche_amnesia.saving.values import StateError, checked
from avalanche_amnesia.strategy import Strategy


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state to save: tensors, numbers in module attributes, frozen parameters, module classes."""
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    with register_all(model):
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        numbers = dict(_number_attributes(model))
    return {"tensors": _by_task(model, tensors), "numbers": numbers, "frozen": frozen, "classes": dict(_classes(model))}


def _by_task(model: nn.Module, tensors: dict[str, Tensor]) -> list[Any]:
    """Split a model's tensors into a list: a dict of shared ones, then a dict per task, each saved in its own file."""
    stores = {name for name, module in model.named_children() if isinstance(module, TaskStore)}
    of_tasks: dict[str, dict[str, Tensor]] = {"": {}}
    for name, tensor in tensors.items():
        store, _, inside = name.partition(".")
        task = inside.partition(".")[0] if store in stores else ""
        of_tasks.setdefault(task, {})[name] = tensor
    return [of_tasks.pop(""), *map(OwnFile, of_tasks.values())]


_NUMBERS = (bool, int, float)
_KINDS = {
    "tensors": list[dict[str, Tensor]],
    "numbers": dict[str, bool | int | float],
    "frozen": list[str],
    "classes": dict[str, str],
}


def same_class(ours: str, theirs: str) -> bool:
    """Return True if two class names are equal, or differ in a script's module, called ``__main__`` while it runs."""
    (module, _, name), (other, _, its) = ours.rpartition("."), theirs.rpartition(".")
    return name == its and (module == other or "__main__" in (module, other))


def mismatch(model: nn.Module, state: Any) -> str | None:
    """Return why a saved state does not fit a model (class, shape or dtype), or None if it fits."""
    parts, _, _, there = checked(state, **_KINDS)
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    here = dict(_classes(model))
    for path in sorted({*here, *there}):
        if not same_class(here.get(path, ""), there.get(path, "")):
            return f"{path or 'it'} is a {there.get(path)} there, and a {here.get(path)} here"
    for name, value in model.named_parameters():
        held = tensors.get(name, value)
        if value.shape != held.shape:
            return f"{name} has shape {tuple(held.shape)} there, and {tuple(value.shape)} here"
        if value.dtype != held.dtype:
            return f"{name} is {held.dtype} there, and {value.dtype} here"
    return None


def load_model_state(model: nn.Module, state: Any) -> None:
    """Load a saved state into a model of the same classes and shapes."""
    parts, numbers, frozen, _ = checked(state, **_KINDS)
    model.load_state_dict({name: tensor for part in parts for name, tensor in part.items()})
    with register_all(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for path, value in numbers.items():
            inside, _, attribute = path.rpartition(".")
            module = model.get_submodule(inside)
            held = getattr(module, attribute, None)
            known = held is None or (type(held) in _NUMBERS and isinstance(held, bool) is isinstance(value, bool))
            if attribute.startswith("_") or not known:
                raise StateError(f"invalid value in state at {path}: no state of a {type(module).__name__} sets it")
            setattr(module, attribute, value)


def _number_attributes(model: nn.Module) -> Iterator[tuple[str, bool | int | float]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in _NUMBERS and not name.startswith("_"):
                yield f"{path}.{name}".lstrip("."), value


def _classes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield path and class name of the model and of each backbone module; tasks' own modules are left out."""
    for path, module in model.named_modules():
        if path.split(".")[0] in ("", "backbone"):
            yield path, f"{type(module).__module__}.{type(module).__qualname__}"


@dataclass(frozen=True)
class Conversion:
    """Pair of functions that convert an attribute to a value of a saved state, and back.

    Args:
        take: function from the value to JSON types, tensors, and containers of these.
        give: function from the saved value, the attribute's current value and the strategy to the new value.
    """

    take: Callable[[Any], Any]
    give: Callable[[Any, Any, Any], Any]


_CONVERSIONS: dict[type, dict[str, Conversion | None]] = {}


def register_state(kind: type, **attributes: Conversion | None) -> None:
    """Register how attributes of a third-party plugin or strategy are saved and loaded.

    Settings (attributes named like constructor arguments) are compared, not saved. All further attributes that hold
    JSON types and tensors are saved unchanged, unless they are named here.

    Args:
        kind: the class; its subclasses are included.
        attributes: name → its conversion; None: the attribute is neither saved nor loaded.
    """
    _CONVERSIONS[kind] = attributes


def is_saved(obj: Any) -> bool:
    """Return True if an object's state is saved: it has ``load_state()``, or its class has a registered conversion."""
    return hasattr(type(obj), "load_state") or any(kind in _CONVERSIONS for kind in type(obj).__mro__)


def state_of(obj: Any, left_out: frozenset[str] = frozenset()) -> Any:
    """Return what to save of a strategy, plugin, criterion or metric: its ``state()``, or else its attributes.

    Settings, ``left_out`` and names registered as unsaved are omitted; registered conversions are applied.
    """
    if hasattr(type(obj), "load_state"):
        return obj.state()
    hidden = left_out | _unsaved_names(obj)
    kept = {key: value for key, value in getattr(obj, "__dict__", {}).items() if key not in hidden}
    state = {key: dict(value) if isinstance(value, dict) else value for key, value in kept.items()}
    state |= {key: by.take(kept[key]) for key, by in _conversions(obj).items() if by is not None and key in kept}
    return state | ({"state_dict": dict(obj.state_dict())} if isinstance(obj, nn.Module) else {})


def check_state(obj: Any, state: Any) -> None:
    """Raise StateError if the ``state`` of an object contains values that can't be saved."""
    name = type(obj).__name__
    try:
        encode(state, f"{name}.state()" if hasattr(type(obj), "load_state") else name)
    except StateError as error:
        raise StateError(
            f"{error}: a state holds JSON types, tensors, and lists, tuples, sets and dicts of these. Give {name} a "
            f"state() and a load_state(state) of these, or register_state({name}, attribute=Conversion(…))"
        ) from None


def load_state_of(obj: Any, state: Any, strategy: Strategy, left_out: frozenset[str] = frozenset()) -> None:
    """Load a result of :func:`state_of` into ``obj``; raise StateError for an attribute that ``obj`` does not save."""
    if hasattr(type(obj), "load_state"):
        obj.load_state(state)
        return
    conversions, new = _conversions(obj), dict(state)
    tensors = new.pop("state_dict") if isinstance(obj, nn.Module) else {}
    hidden = left_out | _unsaved_names(obj)
    for name in new:
        # A user's plugin may create an attribute during training; Avalanche creates its attributes in constructors.
        held = vars(obj).get(name, getattr(type(obj), name, None))
        alike = held is None or name in conversions or type(held) in (type(new[name]), defaultdict)
        of_host = name in vars(obj) and alike
        known = of_host if obj is strategy else not name.startswith("__")
        if name in hidden or not known or not (name in conversions or _is_state(held)):
            raise StateError(f"invalid value in state at {name}: no state of a {type(obj).__name__} sets it")
    given = {}
    for name, value in new.items():
        held, conversion = getattr(obj, name, None), conversions.get(name)
        if conversion is not None:
            given[name] = conversion.give(value, held, strategy)
        else:
            given[name] = refill(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    if isinstance(obj, nn.Module):
        obj.load_state_dict(tensors)
    if given:
        vars(obj).update(given)


def _is_state(value: Any) -> bool:
    """Return True if a saved state can hold the value."""
    try:
        encode(dict(value) if isinstance(value, dict) else value)
    except StateError:
        return False
    return True


def _conversions(obj: Any) -> dict[str, Conversion | None]:
    """Return the functions registered to convert an object's attributes for saving and loading, by attribute name."""
    found: dict[str, Conversion | None] = {}
    for kind in reversed(type(obj).__mro__):
        found |= _CONVERSIONS.get(kind, {})
    return found


def _unsaved_names(obj: Any) -> frozenset[str]:
    """Return the names of unsaved attributes: settings, those registered as unsaved, private ones of modules."""
    inside = [name for name in vars(obj) if name.startswith("_")] if isinstance(obj, nn.Module) else ()
    unsaved = (name for name, conversion in _conversions(obj).items() if conversion is None)
    return frozenset((*own_settings(obj), *unsaved, *inside))


def refill(held: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the same class as ``held`` (for example ``defaultdict``) with new items."""
    new = held.copy()
    new.clear()
    new.update(items)
    return new
