"""Functions that a command line names."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def named(name: str, option: str) -> Any:
    """Look up what ``module:name`` names; modules of the working directory are found."""
    module, _, inside = name.partition(":")
    if not module or not inside:
        raise ValueError(f"{option} must be MODULE:NAME, got {name!r}: for example train:make_strategy")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), inside)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {name}: {error}; run the command where {module}.py lies") from error
    finally:
        sys.path.remove(os.getcwd())
