"""The README's Python runs as it stands, top to bottom, the way a reader pastes it."""

import os
import re
from pathlib import Path

import pytest
from support.forked import run_script

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DESIGN_SCRIPT_BEGINS = "benchmark = with_unlearning(SplitDigits(), requests={1: [0], 3: [1], 4: [4]}"


@pytest.mark.slow
def test_every_block_runs_in_order(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert DESIGN_SCRIPT_BEGINS in blocks[0]
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(blocks))
    said = run_script(script, environment=os.environ | {"WANDB_MODE": "offline"})
    assert (tmp_path / "unlearned-3.json").exists()
    assert list(tmp_path.glob("wandb/offline-run-*"))
    assert (tmp_path / "runs/state").is_dir()
    assert "approximate" in said
    assert "JSD_own" in said


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end in."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "REPRODUCIBILITY.md"])
def test_every_file_and_heading_that_the_page_links_to_exists(name):
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / name).read_text())
    assert len(links) > 10
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        assert not anchor or anchor in anchors(ROOT / path), link


def test_reproducibility_names_every_table_of_results():
    said = (ROOT / "REPRODUCIBILITY.md").read_text()
    tables = [path for folder in ("experiments/results", "results") for path in (ROOT / folder).rglob("*.md")]
    assert len(tables) > 10
    for path in tables:
        assert path.relative_to(ROOT).as_posix() in said or f"`{path.name}`" in said, path.name
