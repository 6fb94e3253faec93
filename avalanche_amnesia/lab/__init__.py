"""Run and compare experiments: run store, sweeps, executors, report and command line (extra ``lab``)."""

from importlib.util import find_spec

NEEDS = ("cloudpickle", "filelock", "jinja2", "loky", "markupsafe", "shtab", "yaml")
"""Modules that only the extra ``lab`` is guaranteed to install."""

_missing = [name for name in NEEDS if find_spec(name) is None]
if _missing:
    raise ImportError(f'the lab needs {", ".join(_missing)}: pip install "avalanche-amnesia[lab]"')
