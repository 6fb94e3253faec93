"""Words of a command line that name an experiment's file and change its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from avalanche_amnesia.checks import did_you_mean

PROFILES = "profiles"
"""Key of an experiment's file: profile → the settings that it changes."""
EXTENDS = "extends"
"""Key of an experiment's file: another file, beside it, or several, whose settings it takes over and changes."""


def expanded(words: Sequence[str]) -> list[str]:
    """A command's words with the experiment's file read and ``key=value`` made options.

    ``run x.yaml seed=3 --profile small`` becomes ``run --config {…} --seed=3``; ``plan x.yaml``, ``sweep --plan``.
    """
    command, *rest = words
    file, profile, options = None, None, []
    changes: dict[str, Any] = {}
    takes_value = False
    for word in rest:
        name, equals, value = word.lstrip("-").partition("=")
        if takes_value:
            profile, takes_value = word, False
        elif name == "profile":
            profile, takes_value = (value, False) if equals else (None, True)
        elif equals and ".options." in name:  # a level that has no type of its own, where the parser can't reach
            changes = _merged(changes, _nested(name.split("."), yaml.safe_load(value)))
        elif word.startswith("-"):
            options.append(word)
        elif equals:
            options.append(f"--{word}")
        elif file is None and Path(word).suffix in (".yaml", ".yml"):
            file = Path(word)
        else:
            options.append(word)
    if file is None:
        if not {"-h", "--help", "--config"} & {option.partition("=")[0] for option in options}:
            raise ValueError(f"{command} needs an experiment's file: amnesia {command} experiments/split_mnist.yaml")
        return [command, *options]
    if command == "plan":
        command, options = "sweep", [*options, "--plan"]
    return [command, "--config", json.dumps(_merged(read_experiment(file, profile), changes)), *options]


def read_experiment(file: Path, profile: str | None = None) -> dict[str, Any]:
    """Settings of an experiment's file and of those that it extends, unchecked.

    A method or scenario that is null is left out.
    """
    content = _extended(file)
    profiles = content.pop(PROFILES, {})
    if profile is not None:
        if profile not in profiles:
            there = (", ".join(profiles) or "none") + did_you_mean(profile, profiles)
            raise ValueError(f"{file} has no profile {profile!r}, it has {there}")
        content = _merged(content, profiles[profile])
    for key in ("methods", "scenarios"):
        if isinstance(content.get(key), Mapping):
            content[key] = {name: value for name, value in content[key].items() if value is not None}
    return content


def _extended(file: Path, extending: Sequence[Path] = ()) -> dict[str, Any]:
    """Content of a file over that of the files which it extends, the last of these first."""
    if not file.is_file():
        there = [path.name for path in file.parent.glob("*.y*ml")]
        raise FileNotFoundError(f"there is no file {file}{did_you_mean(file.name, there)}")
    if file.resolve() in extending:
        raise ValueError(f"{file} extends itself, by way of {', '.join(path.name for path in extending)}")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no settings: an experiment is 'name: …', 'methods: …' and so on")
    bases = content.pop(EXTENDS, [])
    result: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        result = _merged(result, _extended(file.parent / base, [*extending, file.resolve()]))
    return _merged(result, content)


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """``a``, ``b`` and a value → ``{a: {b: value}}``."""
    return {keys[0]: value if len(keys) == 1 else _nested(keys[1:], value)}


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings joined: what ``changes`` has goes before."""
    result = dict(content)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
