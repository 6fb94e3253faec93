"""Origin of a strategy's model, for records: method, settings, seed and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from avalanche_amnesia.audit.record import Provenance

_PLAIN = (bool, int, float, str, type(None))


def provenance_of(strategy: Any, data: Mapping[int, str]) -> Provenance:
    """Origin of a strategy's model, as a record states it."""
    seeding = next((plugin for plugin in strategy.plugins if getattr(plugin, "seeds_tasks", False)), None)
    optimizer = strategy.optimizer
    options = {type(thing).__name__: _settings(vars(thing)) for thing in (strategy, *strategy.plugins)}
    options[type(optimizer).__name__] = _settings(optimizer.defaults)
    return Provenance(
        method=type(strategy).__name__,
        options=options,
        seed=None if seeding is None else seeding.seed,
        data={str(task): digest for task, digest in sorted(data.items())},
    )


def _settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values among attributes, and settings of masks and pools, as values of JSON."""
    public = {name: value for name, value in attributes.items() if not name.startswith("_")}
    return {name: _as_json(value) for name, value in public.items() if isinstance(value, _PLAIN) or _is_settings(value)}


def _is_settings(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(entry, _PLAIN) for entry in value)
    return is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _as_json(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return [_as_json(entry) for entry in value]
    if isinstance(value, Mapping):  # slots by task
        return {str(key): _as_json(entry) for key, entry in value.items()}
    if is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, torch.dtype):
        return str(value)
    return type(value).__name__
