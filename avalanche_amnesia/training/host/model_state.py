"""State of a model: its tensors, and the plain attributes of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from avalanche_amnesia.models.task_store import whole
from avalanche_amnesia.saving.encoding import checked


def model_state(model: nn.Module) -> dict[str, Any]:
    """Tensors of a model, numbers that its modules hold (a counter beside the buffers is state too), and classes."""
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    with whole(model):
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        numbers = dict(_numbers(model))
    return {"tensors": tensors, "numbers": numbers, "frozen": frozen, "classes": dict(_classes(model))}


_KINDS = {"tensors": dict, "numbers": dict, "frozen": list, "classes": dict}


def unlike(model: nn.Module, state: Any) -> str | None:
    """Reason why a state is another model's; None where nothing speaks against it."""
    tensors, _, _, there = checked(state, **_KINDS)
    here = dict(_classes(model))
    for path in sorted({*here, *there}):
        if here.get(path) != there.get(path):
            return f"{path or 'it'} is a {there.get(path)} there, and a {here.get(path)} here"
    for name, value in model.named_parameters():
        held = tensors.get(name, value)
        if value.shape != held.shape:
            return f"{name} has shape {tuple(held.shape)} there, and {tuple(value.shape)} here"
        if value.dtype != held.dtype:
            return f"{name} is {held.dtype} there, and {value.dtype} here"
    return None


def load_model_state(model: nn.Module, state: Any) -> None:
    """Give a model of the same kind the state of another one.

    Raises:
        RuntimeError: if it is another model's; only some of it may have been loaded.
    """
    tensors, numbers, frozen, _ = checked(state, **_KINDS)
    model.load_state_dict(tensors)
    with whole(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for path, value in numbers.items():
            inside, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(inside), attribute, value)


def _numbers(model: nn.Module) -> Iterator[tuple[str, bool | int | float]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in (bool, int, float) and not name.startswith("_"):
                yield f"{path}.{name}".lstrip("."), value


def _classes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Classes of the model and of the modules in its backbone, by path; tasks' own modules are made as they come."""
    for path, module in model.named_modules():
        if path.split(".")[0] in ("", "backbone"):
            yield path, f"{type(module).__module__}.{type(module).__qualname__}"
