"""Commands import only the packages that they need."""

import io
import subprocess
import sys

from avalanche_amnesia.lab import command_line

SCRIPT = """
import sys
from avalanche_amnesia.lab.command_line import main

try:
    main(["run", "--help"])
except SystemExit:
    print("imported:", {"torch", "avalanche", "numpy", "wandb", "yaml"} & set(sys.modules))
for words in (
    *("verify absent.json", "verify binary.yaml", "report absent", "report . --tables tables", "plan absent.yaml"),
    *("plan binary.yaml", "sweep experiment.yaml methods.A.kind=B", "run experiment.yaml --out binary.yaml"),
    *("unlearn . --tasks 1 --factory a:b --record absent.json", "nothing", "sync absent"),
):
    assert main(words.split()) == 2, words
assert not {"torch", "avalanche", "wandb"} & set(sys.modules), "to say what is wrong"
import avalanche_amnesia.audit.record, avalanche_amnesia.lab.report.page, avalanche_amnesia.lab.study.tables
assert not {"torch", "avalanche", "wandb"} & set(sys.modules), "for records, pages and tables"
"""


def test_help_imports_nothing_slow_and_wrong_files_are_refused_without_importing_torch(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "experiment.yaml").write_text("name: x\nmethods: {A: {kind: HAT}}\n")
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "--training.batch_size" in done.stdout
    assert "\nimported: set()\n" in done.stdout
    told = done.stderr.splitlines()
    assert len(told) == 11
    assert all(line.startswith("amnesia: ") for line in told)
    assert "there is no file absent.json" in told[0]
    assert told[1] == "amnesia: binary.yaml: it is no text"
    assert told[5] == "amnesia: binary.yaml is no YAML (no text)"
    assert told[9].startswith("amnesia: there is no command 'nothing'")


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown := io.BytesIO(), "ascii"))
    command_line._print("75.0\xa0%")
    assert shown.getvalue() == b"75.0?%\n"
