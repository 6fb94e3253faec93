"""The script experiments/compare.py, called from the command line."""

import csv

import pytest

from avalanche_amnesia.ledger import RequestError
from experiments import compare


@pytest.fixture
def called(monkeypatch, tmp_path):
    """Return a function that calls the script and returns the rows of its table."""

    def called(*words):
        monkeypatch.setattr("sys.argv", ["compare.py", "--tasks", "2", *words, "--out", str(tmp_path)])
        compare.main()
        return list(csv.DictReader((tmp_path / "per_seed.csv").open()))

    return called


@pytest.mark.slow
def test_methods_are_compared_over_seeds(called, tmp_path, capsys):
    methods = ("hat", "amnesiac_hat", "ewc")
    budget = ("--epochs", "2", "--n-train", "500", "--n-test", "200")
    rows = called("--methods", *methods, "--seeds", "0", "1", *budget, "--requests", '{"1": [0]}')
    assert [(row["method"], row["seed"]) for row in rows] == [(method, seed) for method in methods for seed in "01"]
    controls = [row for row in rows if row["method"] == "hat"]
    assert all(float(row["ad"]) == 0 for row in controls)  # it never unlearned: it is its own full model
    assert "± " in capsys.readouterr().out
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 6


@pytest.mark.slow
def test_controls_without_unlearning_are_farther_from_the_retrained_model(called):
    requests = ("--epochs", "5", "--requests", '{"1": [0]}')
    rows = {row["method"]: row for row in called("--methods", "amnesiac_hat", "--controls", "--seeds", "0", *requests)}
    for control in ("amnesiac_hat+nothing", "amnesiac_hat+head"):
        for measure in ("jsd_own", "unlearned"):
            assert float(rows[control][measure]) > float(rows["amnesiac_hat"][measure])


def test_a_bad_request_is_refused_before_training(called):
    with pytest.raises(RequestError, match=r"after task 0.*task 3"):
        called("--requests", '{"0": [3]}', "--methods", "naive")
