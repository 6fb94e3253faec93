"""The README's Python runs as it stands, top to bottom, the way a reader pastes it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
DESIGN_SCRIPT_BEGINS = "benchmark = with_unlearning(SplitDigits(), requests={1: [0], 3: [1], 4: [4]}"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_every_block_runs_in_order(tmp_path):
    blocks = python_blocks()
    assert DESIGN_SCRIPT_BEGINS in blocks[0]
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "unlearned-3.json").exists()
    assert list(tmp_path.glob("wandb/offline-run-*"))
    assert (tmp_path / "runs/state").is_dir()
    assert "approximate" in done.stdout
    assert "JSD_own" in done.stdout


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end in."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_file_and_heading_that_the_readme_links_to_exists():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README.read_text())
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        assert (README.parent / path).is_file(), link
        assert not anchor or anchor in anchors(README.parent / path), link
