"""Things of somebody's own, by the words ``module:name``."""

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any


def named(name: str, place: str) -> Any:
    """Look up what ``module:name`` names; modules of the working directory are found, as by ``python -m``.

    Args:
        name: the words.
        place: setting or option that has them, for errors.

    Raises:
        ValueError: where there is no such module, or nothing of this name in it.
    """
    module, _, inside = name.partition(":")
    if not module or not inside:
        raise ValueError(f"{place} must be MODULE:NAME, got {name!r}: for example train:make_strategy")
    if os.getcwd() not in sys.path:  # and stays there: what the module imports later lies beside it
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), inside)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{place} {name}: {error}; run the command where {module}.py lies") from error


def chosen(name: str, known: Mapping[str, Any], place: str) -> Any:
    """Look up one of ours by its name, or somebody's own by ``module:name``."""
    return named(name, place) if ":" in name else known[name]
