"""experiments/compare.py as a user calls it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "compare.py"


@pytest.mark.slow
def test_compares_methods_over_seeds(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--methods",
        "hat",
        "amnesiac_hat",
        "ewc",
        "--seeds",
        "0",
        "1",
        "--epochs",
        "2",
    ]
    command += ["--tasks", "2", "--requests", '{"1": [0]}', "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(csv.DictReader((tmp_path / "per_seed.csv").open()))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (method, seed) for method in ("hat", "amnesiac_hat", "ewc") for seed in "01"
    ]
    controls = [row for row in rows if row["method"] == "hat"]
    assert all(float(row["ad"]) == 0 for row in controls)  # it never unlearned: it is its own full model
    assert "± " in done.stdout
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 6


@pytest.mark.slow
def test_a_method_that_does_nothing_is_farther_from_the_retrained_model(tmp_path):
    """Beside itself: a distance means nothing between networks whose masks were learned in other ways."""
    command = [sys.executable, str(SCRIPT), "--methods", "amnesiac_hat", "--controls", "--seeds", "0", "--epochs", "5"]
    command += ["--tasks", "2", "--requests", '{"1": [0]}', "--out", str(tmp_path)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "per_seed.csv").open())}
    for control in ("amnesiac_hat+nothing", "amnesiac_hat+head"):
        for measure in ("jsd_own", "unlearned"):
            assert float(rows[control][measure]) > float(rows["amnesiac_hat"][measure])


def test_a_bad_request_is_refused_before_training(tmp_path):
    command = [sys.executable, str(SCRIPT), "--requests", '{"0": [3]}', "--out", str(tmp_path), "--methods", "naive"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "after task 0" in done.stderr
    assert "task 3" in done.stderr
