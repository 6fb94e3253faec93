"""Studies: the run store, sweeps, executors, the report and the command line."""

from importlib.util import find_spec

_missing = [
    name for name in ("cloudpickle", "filelock", "jinja2", "loky", "rich", "shtab", "yaml") if find_spec(name) is None
]
if _missing:
    raise ImportError(f'the lab needs {", ".join(_missing)}: pip install "avalanche-amnesia[lab]"')
