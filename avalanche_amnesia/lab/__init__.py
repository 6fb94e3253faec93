"""Run and compare experiments: run store, sweeps, executors, report and command line (extra ``lab``)."""

from importlib.util import find_spec

from avalanche_amnesia.faces import face

NEEDS = ("cloudpickle", "filelock", "jinja2", "loky", "markupsafe", "shtab", "yaml")
"""Modules that only the extra ``lab`` is guaranteed to install."""

_missing = [name for name in NEEDS if find_spec(name) is None]
if _missing:
    raise ImportError(f'the lab needs {", ".join(_missing)}: pip install "avalanche-amnesia[lab]"')

__getattr__, __dir__, __all__ = face(__name__, __file__)
