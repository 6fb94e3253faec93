"""Words of a command line that name an experiment's file and change its settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

PROFILES = "profiles"
"""Key of an experiment's file: profile → the settings that it changes."""


def expanded(words: Sequence[str]) -> list[str]:
    """A command's words with the experiment's file read and ``key=value`` made options.

    ``run x.yaml seed=3 --profile small`` becomes ``run --config {…} --seed=3``; ``plan x.yaml``, ``sweep --plan``.

    Args:
        words: the command first; then the file, wherever it stands.

    Raises:
        ValueError: if there is no file, or it holds no settings, or not the profile that is asked for.
    """
    command, *rest = words
    file, profile, options = None, None, []
    takes_value = False
    for word in rest:
        name, equals, value = word.lstrip("-").partition("=")
        if takes_value:
            profile, takes_value = word, False
        elif name == "profile":
            profile, takes_value = (value, False) if equals else (None, True)
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
    return [command, "--config", json.dumps(read_experiment(file, profile)), *options]


def read_experiment(file: Path, profile: str | None = None) -> dict[str, Any]:
    """Settings of an experiment's file, unchecked.

    Args:
        file: YAML.
        profile: whose settings replace those of the same names.

    Raises:
        OSError: if it can't be read.
        ValueError: if it holds no settings, or not this profile.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no settings: an experiment is 'name: …', 'methods: …' and so on")
    profiles = content.pop(PROFILES, {})
    if profile is None:
        return content
    if profile not in profiles:
        nearest = difflib.get_close_matches(profile, profiles, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"{file} has no profile {profile!r}, it has {', '.join(profiles) or 'none'}{hint}")
    return _merged(content, profiles[profile])


def _merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings joined: what ``changes`` has goes before."""
    result = dict(content)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
