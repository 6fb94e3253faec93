"""Experiments read from their files: with what a file takes over from others, a profile, and changes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from avalanche_amnesia.checks import did_you_mean
from avalanche_amnesia.lab.study.settings import Experiment
from avalanche_amnesia.typed import typed


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-3`` is a number, as in YAML 1.2."""


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


def from_yaml(text: str) -> Any:
    """Value of a YAML text; runs no code from it."""
    return yaml.load(text, _Loader)


def read_experiment(file: Path, profile: str | None = None, changes: Iterable[tuple[str, str]] = ()) -> Experiment:
    """Read an experiment's file, and those that it extends.

    Args:
        file: YAML; a method or scenario that is null there is left out.
        profile: one of its profiles.
        changes: setting, with a dot for each level, and its value as YAML: ``("training.epochs", "3")``.

    Raises:
        ValueError, OSError: if a file is none, or for a setting that does not exist or can't be so.
    """
    content = _extended(file)
    profiles = content.pop("profiles", {})
    if profile is not None:
        if profile not in profiles:
            there = (", ".join(profiles) or "none") + did_you_mean(profile, profiles)
            raise ValueError(f"{file} has no profile {profile!r}, it has {there}")
        content = _merged(content, profiles[profile])
    for key in ("methods", "scenarios"):
        if isinstance(content.get(key), Mapping):
            content[key] = {name: value for name, value in content[key].items() if value is not None}
    for name, value in changes:
        change = from_yaml(value)
        for key in reversed(name.split(".")):
            change = {key: change}
        content = _merged(content, change)
    return cast(Experiment, typed(Experiment, content))


def _extended(file: Path, extending: Sequence[Path] = ()) -> dict[str, Any]:
    """Content of a file over that of the files which it extends, the last of these first."""
    if not file.is_file():
        there = [path.name for path in file.parent.glob("*.y*ml")]
        raise FileNotFoundError(f"there is no file {file}{did_you_mean(file.name, there)}")
    if file.resolve() in extending:
        raise ValueError(f"{file} extends itself, by way of {', '.join(path.name for path in extending)}")
    try:
        content = from_yaml(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no settings: an experiment is 'name: …', 'methods: …' and so on")
    bases = content.pop("extends", [])
    result: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        result = _merged(result, _extended(file.parent / base, [*extending, file.resolve()]))
    return _merged(result, content)


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings joined: what ``changes`` has goes before."""
    result = dict(content)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
