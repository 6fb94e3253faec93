"""The README's Python runs as it stands, top to bottom, the way a reader pastes it."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
DESIGN_SCRIPT_BEGINS = "benchmark = with_unlearning(SplitDigits(), requests={1: [0], 3: [1], 4: [4]}"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_every_block_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    blocks = python_blocks()
    assert DESIGN_SCRIPT_BEGINS in blocks[0]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert (tmp_path / "unlearned-3.json").exists()
    assert list(tmp_path.glob("wandb/offline-run-*"))
    printed = capsys.readouterr().out
    assert "torch.Size([16])" in printed
    assert "JSD_own" in printed


def test_every_file_that_the_readme_shows_exists():
    for path in re.findall(r"\]\((?!https?:)([^)]+)\)", README.read_text()):
        assert (README.parent / path).is_file(), path
