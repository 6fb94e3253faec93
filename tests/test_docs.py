"""The documentation keeps its word: its Python and commands run, and its figures are those of the result files."""

import doctest
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import run_script

from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.lab.study.building import make_scenario
from avalanche_amnesia.lab.study.experiment import experiment_of, from_yaml
from experiments import shown_tables

ROOT = Path(__file__).parents[1]
DOCS, RESULTS, PACKAGE = ROOT / "docs", ROOT / "experiments" / "results", ROOT / "avalanche_amnesia"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
WITHOUT_PYTHON = {"architecture.md", "concepts.md", "experiments.md"}
WITH_PYTHON = [name for name in [*PAGES, "first_request.ipynb"] if name not in WITHOUT_PYTHON]
BEFORE = """
from support.forked_interpreters import forked_interpreters
from torchvision import models
forked = forked_interpreters()
forked.__enter__()
models.resnet18 = lambda: models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
"""
"""Lets workers of a page's sweep be forked, because each would import the host first; halves a network's trace."""
NOTEBOOK_ENDS = "exact\nall bits equal: True"
PRINTS = {
    "getting_started.md": ["torch.Size([16])", "approximate"],
    "forgetting.md": ["exact", "task 2 may have learned from task 1"],
    "compliance.md": ["exact"],
    "pretrained.md": ["claim        exact"],
    "first_request.ipynb": [NOTEBOOK_ENDS],
}


def written(path: Path) -> list[str]:
    """The Python of a page or notebook."""
    if path.suffix == ".md":
        return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_the_python_of_every_page_runs(name, tmp_path):
    script = tmp_path / "pasted.py"
    blocks = written(DOCS / name)
    assert blocks
    script.write_text(BEFORE + re.sub(r"train_epochs=\d+", "train_epochs=1", "\n".join(blocks)))
    printed = run_script(script)
    for words in PRINTS.get(name, []):
        assert words in printed


def test_the_demo_of_a_pretrained_network_is_the_script_of_its_page():
    lines = re.search(r"sed -n '(.*)' docs/pretrained.md", (ROOT / "Makefile").read_text())[1].replace("$$", "$")
    done = subprocess.run(["sed", "-n", lines, DOCS / "pretrained.md"], capture_output=True, text=True, check=True)
    assert [done.stdout] == written(DOCS / "pretrained.md")


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """Page and words of every command line of a program in a shell block."""
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.split()
                if words[:1] == [program]:
                    yield page.name, words[1:]


def test_every_command_has_the_options_that_pages_give_it(capsys):
    seen = 0
    for page, (command, *words) in commands("amnesia"):
        with pytest.raises(SystemExit) as done:
            main([command, "--help"])
        assert done.value.code == 0, (page, command)
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in known, (page, command, option)
            seen += 1
    assert seen >= 10


def test_every_experiment_and_scenario_that_pages_show_is_one():
    seen = 0
    for page in DOCS.glob("*.md"):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL):
            content = from_yaml(block, page.name)
            if content.keys() & {"methods", "scenarios"} and "extends" not in content:
                content.pop("profiles", None)
                experiment = experiment_of({"name": "shown", "methods": {"any": {"kind": "Independent"}}} | content)
                for scenario in experiment.scenarios.values():
                    if ":" not in scenario.name:
                        make_scenario(scenario, experiment.stream.n_tasks)
                seen += 1
    assert seen >= 3


def test_every_make_target_of_the_pages_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {(words[0], page) for page, words in commands("make")}
    for page in (DOCS / "getting_started.md", ROOT / "CONTRIBUTING.md"):
        named |= {(target, page.name) for target in re.findall(r"`make (\w+)`", page.read_text())}
    assert {target for target, _ in named} >= {"demo", "test", "docs", "package"}
    for target, page in named:
        assert target in targets, page


def table_rows(path: Path, start: str) -> dict[str, list[str]]:
    """First cell → other cells, of the first table behind a line that starts so."""
    lines = path.read_text().split(start, 1)[1].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = {}
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    return rows


@pytest.mark.parametrize("page", shown_tables.PAGES, ids=lambda page: page.name)
def test_tables_of_results_are_up_to_date(page):
    assert shown_tables.refreshed(page) == page.read_text(), "run `make tables`"


NUMBER = re.compile(r"(?<![\w.])\d*\.\d+(?![\w.])")
NOT_MEASURED = {"clusters.md": {"0.25"}, "metrics.md": {"0.5", ".001"}}  # a setting, chance, a threshold


def stands_in(number: str, file: Path) -> bool:
    """Whether a number of a file, in per cent where it is no table, rounds to this one."""
    scales, half = (1,) if file.suffix == ".md" else (1, 100), 0.501 / 10 ** len(number.split(".")[1])
    values = {float(found) for found in re.findall(r"\d+\.\d+", file.read_text())}
    return any(abs(value * scale - float(number)) <= half for value in values for scale in scales)


@pytest.mark.parametrize("page", shown_tables.PAGES, ids=lambda page: page.name)
def test_every_number_of_a_table_is_in_a_result_that_its_section_names(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        names = re.findall(r"[\w./-]*results/[\w./-]+\.(?:md|csv|json)", section)
        files = {(base / name).resolve() for name in names for base in (page.parent, ROOT) if (base / name).is_file()}
        for line in (line for line in section.splitlines() if line.startswith("|")):
            cells = re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv [\d.]+", "", line).split("|")
            cells[2:3] = [] if section.startswith("Beside the papers") else cells[2:3]  # what papers report
            numbers = set(NUMBER.findall(" ".join(cells))) - NOT_MEASURED.get(page.name, set())
            assert not [each for each in numbers if not any(stands_in(each, file) for file in files)], line


def test_every_table_that_pages_show_is_there():
    named = {found[2] for page in shown_tables.PAGES for found in shown_tables.SHOWN.finditer(page.read_text())}
    assert named >= {f"experiments/results/{name}.md" for name in ("comparison", "published")}
    assert all((ROOT / name).is_file() for name in named)


def test_the_ablation_is_that_of_the_results():
    shown = table_rows(DOCS / "options.md", "### What each choice leaves")
    measured = table_rows(RESULTS / "ablation.md", "* claim: of the last record")
    names = ("nothing", "heads-only", "exclusive", "delete", "backup-before", "counterfactual", "repair-joint")
    names += ("counterfactual+repair-joint",)
    assert len(shown) == len(names)
    for cells, name in zip(shown.values(), names, strict=True):
        accuracy, differences, divergence, old_head = measured[name][:4]
        assert float(cells[0]) == pytest.approx(float(accuracy.split()[0]), abs=0.051), name
        assert float(cells[1].replace("−", "-")) == pytest.approx(float(differences.split(" / ")[-1]), abs=0.051), name
        told, _, ratio = divergence.partition(" (")[0].partition(", ")
        assert cells[2] == (ratio.removesuffix(" ×") or told), name
        assert float(cells[3]) == float(old_head.split()[0]), name


def test_the_notebook_has_run_from_top_to_bottom():
    path = DOCS / "first_request.ipynb"
    assert path.stat().st_size < 300_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join("".join(output.get("text", [])) for output in outputs)
    assert NOTEBOOK_ENDS in text


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text()],
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_examples_in_docstrings(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_an_import_loads_no_subpackage_and_no_library():
    # So it takes as long with Avalanche in memory as without, which would take this test some ten seconds to import.
    code = "import sys; before = set(sys.modules); import avalanche_amnesia; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert "avalanche_amnesia" in added
    assert not [name for name in added if name.startswith(("avalanche_amnesia.", "torch", "numpy"))]
    assert len(added) < 20, added  # lazy_loader, and the few of the standard library that it needs
