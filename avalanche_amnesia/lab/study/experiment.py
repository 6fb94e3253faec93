"""Read experiments from YAML files, list their runs, and find the folders of their results."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, cast

import yaml

from avalanche_amnesia.checks import did_you_mean
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE
from avalanche_amnesia.lab.report.reading import flatten
from avalanche_amnesia.lab.study import settings
from avalanche_amnesia.saving.typed import to_type

RESULTS, SETTINGS = "results.csv", "settings.yaml"


class _Loader(yaml.SafeLoader):
    """YAML loader that reads ``1e-3`` as a number, as in YAML 1.2, and refuses a key that a mapping has twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(str(key.value) for key, _ in node.value)
        if twice := [key for key, _ in node.value if counts[str(key.value)] > 1]:
            raise yaml.MarkedYAMLError(problem=f"two keys {twice[0].value}", problem_mark=twice[1].start_mark)
        return super().construct_mapping(node, deep)


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


def from_yaml(text: str | bytes, path: str) -> Any:
    """Parse YAML text without running code from the text; error messages start with ``path``."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # a character that YAML forbids has none
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path} is no YAML ({getattr(error, 'problem', 'no text')}{line})") from error


def read_experiment(
    file: Path, profile: str | None = None, changes: Iterable[tuple[str, str]] = ()
) -> settings.Experiment:
    """Read an experiment from a YAML file and the files that it extends.

    Args:
        file: YAML file; a null method or scenario is removed.
        profile: name of a profile in the file.
        changes: pairs of a dotted setting name and a value as YAML: ``("training.epochs", "3")``.

    Raises:
        ValueError, OSError: a file is missing or invalid, or a setting is unknown or has an invalid value.
    """
    content = _read_extended(file)
    profiles = to_type(dict[str, dict[str, Any]], content.pop("profiles", {}), f"{file}: profiles")
    if profile is not None:
        _check_known(str(file), "profile", profile, profiles)
        content = _merge(content, profiles[profile])
    try:
        return experiment_of(content, changes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def experiment_of(content: Mapping[str, Any], changes: Iterable[tuple[str, str]] = ()) -> settings.Experiment:
    """Return an experiment from nested settings, after ``changes`` (pairs of a dotted name and a value as YAML)."""
    before = content = dict(content)
    for name, value in changes:
        change = from_yaml(value, f"{name}={value}")
        for key in reversed(name.split(".")):
            change = {key: change}
        content = _merge(content, change)
    for key, what, kind in (("methods", "method", "kind"), ("scenarios", "scenario", "name")):
        if isinstance(content.get(key), Mapping):
            content[key] = {name: value for name, value in content[key].items() if value is not None}
            known = before.get(key) or {}
            for name, value in content[key].items():
                if name not in known and not (isinstance(value, Mapping) and kind in value):
                    _check_known("the experiment", what, name, known)
    return cast(settings.Experiment, to_type(settings.Experiment, content))


def _check_known(owner: str, what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        there = (", ".join(map(repr, known)) or "none") + did_you_mean(name, known)
        raise ValueError(f"{owner} has no {what} {name!r}, it has {there}")


def _read_extended(file: Path, extending: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the settings of a YAML file, merged over the settings of the files named in its key ``extends``."""
    if not file.is_file():
        there = [path.name for path in file.parent.glob("*.y*ml")]
        raise FileNotFoundError(f"there is no file {file}{did_you_mean(file.name, there)}")
    if file.resolve() in extending:
        raise ValueError(f"{file} extends itself, by way of {', '.join(path.name for path in extending)}")
    content = from_yaml(file.read_bytes(), str(file))
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no settings: an experiment is 'name: …', 'methods: …' and so on")
    bases = content.pop("extends", [])
    result: dict[str, Any] = {}
    for base in to_type(list[str], [bases] if isinstance(bases, str) else bases, f"{file}: extends"):
        result = _merge(result, _read_extended(file.parent / base, [*extending, file.resolve()]))
    return _merge(result, content)


def _merge(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested settings with ``changes`` merged in; values of ``changes`` take precedence."""
    result = dict(content)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merge(result[key], value) if both else value
    return result


def cells_of(
    experiment: settings.Experiment,
    methods: Sequence[str] = (),
    scenarios: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[settings.Cell]:
    """Return the runs of an experiment: all combinations of method, scenario and seed that are supported.

    Methods that do not unlearn cannot learn a task twice. Methods that cannot train a task again without some samples
    cannot unlearn samples or classes.

    Args:
        experiment: an experiment.
        methods: names of the methods to run; empty: all.
        scenarios: names of the scenarios to run; empty: all.
        seeds: seeds to run, also seeds not in the experiment; empty: all of the experiment.

    Raises:
        ValueError: the experiment lacks a name, a setting is invalid, or no combination is supported.
    """
    experiment = to_type(settings.Experiment, asdict(experiment))
    asked: Any = (("method", methods, experiment.methods), ("scenario", scenarios, experiment.scenarios))
    for what, given, known in asked:
        for name in given:
            _check_known(f"experiment {experiment.name}", what, name, known)
    wanted = product(methods or experiment.methods, scenarios or experiment.scenarios, seeds or experiment.seeds)
    if not (cells := [settings.Cell(experiment, *names) for names in wanted]):
        raise ValueError(f"experiment {experiment.name} needs a method, a scenario and a seed at least")
    for names in (experiment.methods, experiment.scenarios):
        of_folders = Counter(map(slug, names))
        if shared := [name for name in names if of_folders[slug(name)] > 1 or len(slug(name)) > 200]:
            raise ValueError(f"{shared} can't name folders of results: give other letters and digits, at most 200")
    hindered = [_why_not(experiment.methods[cell.method], experiment.scenarios[cell.scenario]) for cell in cells]
    if not (found := [cell for cell, why in zip(cells, hindered, strict=True) if why is None]):
        raise ValueError(f"{cells[0].method} under {cells[0].scenario}: {hindered[0]}; take another scenario or method")
    return found


def _why_not(method: settings.MethodSettings, scenario: settings.ScenarioSettings) -> str | None:
    """Return why a built-in method can't run under a scenario; None if it can, or if the method is the user's own."""
    if method.kind in settings.OBEY_NOTHING and scenario.name == "relearn":
        return "a method that obeys no request still has the task that comes again, and can't learn it"
    requests = scenario.options.get("requests") or ()
    listed = requests.values() if isinstance(requests, Mapping) else requests
    of_samples = any(isinstance(one, Mapping) and not {"samples", "classes"}.isdisjoint(one) for one in listed)
    if of_samples and method.kind in settings.METHODS and method.kind not in settings.FORGET_SAMPLES:
        return f"samples and classes of a task can only be unlearned by {', '.join(settings.FORGET_SAMPLES)}"
    return None


def all_settings(cell: settings.Cell) -> dict[str, Any]:
    """Return all settings of one run as nested dicts of plain values."""
    experiment = asdict(cell.experiment)
    return {
        "experiment": cell.experiment.name,
        "method": {"name": cell.method, **experiment["methods"][cell.method]},
        "scenario": {"name": cell.scenario, "kind": experiment["scenarios"][cell.scenario].pop("name")}
        | experiment["scenarios"][cell.scenario],
        "seed": cell.seed,
        **{name: experiment[name] for name in ("stream", "network", "training", "floors")},
    }


def folder_of(cell: settings.Cell, out: Path) -> Path:
    """Return the folder of a run's results below the folder of all experiments."""
    return out.joinpath(*map(slug, (cell.experiment.name, cell.method, cell.scenario)), f"seed{cell.seed}")


def is_done(cell: settings.Cell, folder: Path) -> bool:
    """Return True if a folder contains the results of the run ``cell`` with equal settings, as they were written."""
    return (folder / SETTINGS).is_file() and not differences(cell, folder)


def differences(cell: settings.Cell, folder: Path) -> list[str]:
    """Return the names of settings that differ between a run and the results in its folder, and of changed files."""
    if not (folder / SETTINGS).is_file():
        return []
    found, wanted = from_yaml((folder / SETTINGS).read_bytes(), str(folder / SETTINGS)), mark_of(cell, folder)
    found, wanted = flatten(found if isinstance(found, dict) else {}), flatten(wanted)
    return [name for name in wanted | found if found.get(name, ...) != wanted.get(name, ...)]


def mark_of(cell: settings.Cell, folder: Path) -> dict[str, Any]:
    """Return the content of the file that marks a run's results as complete: settings, and hashes of its files."""
    files = [folder / RUN_FILE, folder / RESULTS, *sorted(folder.glob("records/*.json"))]
    hashes = {str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}
    return all_settings(cell) | {"files": hashes}


def slug(name: str) -> str:
    """Convert a name to part of a path: ``AmnesiacHAT, published masks`` → ``AmnesiacHAT-published-masks``."""
    return re.sub(r"[^\w.+λ-]+", "-", name).strip("-").lstrip(".") or "-"  # a name cannot be a parent folder
