"""Structure of the package: subpackages import only lower ones, no import cycles, all dependencies are declared."""

import ast
import functools
import importlib
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from avalanche_amnesia.lab import NEEDS

ROOT = Path(__file__).parents[1]
PACKAGE = "avalanche_amnesia"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
DOOR = f"{PACKAGE}.__main__"
"""The command ``amnesia``: it opens the lab, or names the packages to install."""

FLOORS = (
    ["checks", "strategy", "bits", "text_table", "seeding", "processes", "optimizers", "transaction"],
    *(["saving", "unit_graph"], ["ledger"], ["models", "benchmarks", "trajectory", "audit"]),
    *(["isolation", "unlearning"], ["training"], ["evaluation"], ["logging"], ["contrib"], ["lab"]),
)
"""Subpackages and files, lowest first: each imports only lower floors; files of the lowest may import each other."""

NAMES = {"avalanche": "avalanche-lib", "lazy_loader": "lazy-loader", "PIL": "pillow", "sklearn": "scikit-learn"}
NAMES |= {"yaml": "pyyaml", "tqdm": "avalanche-lib"}
"""Modules whose distribution has another name; tqdm comes with Avalanche."""


def name_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def homes():
    """Map each public name of a subpackage to its file."""
    found = {}
    for stub in ROOT.glob(f"{PACKAGE}/**/__init__.pyi"):
        room = ".".join(stub.relative_to(ROOT).parent.parts)
        for node in ast.walk(ast.parse(stub.read_text())):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{room}.{name.asname or name.name}": f"{room}.{node.module}" for name in node.names}
    return found


@functools.cache
def imports_of(file, at_top=False):
    """Return the modules that a file imports, also inside functions or only at its top, except for annotations."""
    tree = ast.parse(file.read_text())
    unseen = [part for part in ast.walk(tree) if isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test)]
    for part in unseen:
        part.body = []
    modules, own = set(), {name_of(each) for each in FILES}
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                modules.add(full if full in own else homes().get(full, node.module))
    return modules


def arrows():
    for file in FILES:
        for module in imports_of(file):
            if module.partition(".")[0] == PACKAGE and name_of(file) not in (PACKAGE, DOOR):
                yield name_of(file).removeprefix(f"{PACKAGE}."), module.removeprefix(PACKAGE).removeprefix(".")


def floor_of(module):
    room = module.partition(".")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def test_subpackages_import_only_lower_ones():
    up = set()
    for file, module in arrows():
        room, other = file.partition(".")[0], module.partition(".")[0]
        if other and room != other and (floor_of(room) <= floor_of(other) != 0):
            up.add((file, other))
    assert up == {("training.task_strategy", "evaluation")}  # strategy.prove trains references


def test_files_have_no_import_cycle():
    graph = {name_of(file): {module for module in imports_of(file) if module.startswith(PACKAGE)} for file in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' ← '.join(error.args[1])}")


MODULES_OF_HAT = 44
"""The package's modules that HAT reaches by imports at their top, without packages' ``__init__``."""


def test_hat_needs_few_modules():
    files, seen, waiting = {name_of(file): file for file in FILES}, set(), [f"{PACKAGE}.training.strategies"]
    while waiting:
        module = waiting.pop()
        if module in files and module not in seen and files[module].name != "__init__.py":
            seen.add(module)
            waiting += imports_of(files[module], at_top=True)
    assert len(seen) <= MODULES_OF_HAT, sorted(seen)
    assert {name.split(".")[1] for name in seen}.isdisjoint(("unlearning", "trajectory", "isolation", "audit"))


def declared():
    """Return the distributions that each part of the package may use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: {re.split(r"[\[<>=;]", each)[0] for each in packages}
        for name, packages in project["optional-dependencies"].items()
    }
    core = {re.split(r"[\[<>=;]", each)[0] for each in project["dependencies"]}
    anywhere = set().union(*(extras[name] for name in ("sign", "timm", "transformers", "ray", "slurm")))
    contrib = core | extras["contrib"]
    return {"core": core | anywhere, "contrib": contrib | anywhere, "lab": contrib | extras["lab"] | anywhere}


def test_every_import_is_declared_and_the_core_needs_at_most_ten():
    allowed, undeclared = declared(), set()
    for file in FILES:
        wing = name_of(file).removeprefix(f"{PACKAGE}.").partition(".")[0]
        tops = {module.partition(".")[0] for module in imports_of(file)} - set(sys.stdlib_module_names) - {PACKAGE}
        missing = {NAMES.get(top, top) for top in tops} - allowed.get(wing, allowed["core"])
        undeclared |= {(name_of(file), distribution) for distribution in missing}
    assert not undeclared
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 10


def test_the_lab_checks_for_every_package_of_its_extra():
    own = declared()["lab"] - declared()["contrib"] - {PACKAGE.replace("_", "-")}
    assert {NAMES.get(name, name) for name in NEEDS} == own


FACES = [".".join(path.parent.relative_to(ROOT).parts) for path in sorted((ROOT / PACKAGE).rglob("__init__.pyi"))]


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_exists(face):
    module = importlib.import_module(face)
    assert module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
