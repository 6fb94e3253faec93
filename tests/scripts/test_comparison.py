"""The comparison of methods: committed rows and table, equal numbers of trials, and its figure."""

import csv
import json
from collections import Counter
from math import log
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from avalanche_amnesia.benchmarks.digits import digits
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models import MLP
from experiments import compare, comparison
from experiments.comparison_figure import draw
from experiments.methods import METHODS, make
from experiments.streams import Stream, _split, accuracy_on
from experiments.trials import Settings, best, rows_of, rows_tested, search

ROWS = rows_of(comparison.OUTPUT)


def small(scale=1.0):
    return MLP(64, hidden=(round(40 * scale),), features=round(20 * scale))


OPTIONS = {"n_tasks": 2, "n_train": 300, "lr": 4e-3, "training": {"train_mb_size": 16, "train_epochs": 4}}
DIGITS = Stream(lambda root: digits(0), _split, small, {1: [0]}, **OPTIONS)


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setitem(comparison.STREAMS, "digits", DIGITS)
    return "digits"


def middle(method):
    name, value, _ = METHODS[method].setting or (None, None, None)
    return Settings("Adam", 4e-3, {} if name is None else {name: value})


def test_the_committed_table_is_made_of_the_committed_rows():
    assert comparison.OUTPUT.with_suffix(".md").read_text() == comparison.table(ROWS)


def test_settings_were_chosen_on_validation_images_from_equally_many_trials():
    names = ("stream", "fitted", "method")
    trials = Counter(tuple(row[name] for name in names) for row in ROWS if row["validation"])
    for place in {(row["stream"], row["fitted"]) for row in rows_tested(ROWS)}:
        there = {row["method"] for row in rows_tested(ROWS, **dict(zip(names, place, strict=False)))}
        there = {method for method in there if METHODS[method].chosen}
        assert len({trials[*place, method] for method in there}) == 1, place
    assert not {row["seed"] for row in ROWS if row["validation"]} & {row["seed"] for row in rows_tested(ROWS)}
    for row in (row for row in rows_tested(ROWS) if METHODS[row["method"]].chosen):
        what = {name: row[name] for name in names}
        assert row["settings"] == best(ROWS, "settings", **what), what


@pytest.mark.parametrize("method", ["AmnesiacHAT", "HAT", "EWC"])
def test_fitting_heads_changes_only_the_heads(stream, method):
    models = []
    for fitted in (True, False):
        benchmark = comparison.benchmark_of(method, stream, 0, Path(), False)
        strategy = make(method, DIGITS, 0, benchmark, middle(method), fitted)
        strategy.train(benchmark.train_stream[0])
        models.append(strategy.model)
    assert accuracy_on(models[0], benchmark.test_stream[0]) > 0.6
    states = [model.state_dict() for model in models]
    other = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert bool(other) == (METHODS[method].heads != "always")
    assert all("head" in name or "_importances" in name for name in other)  # importances depend on the head


@pytest.mark.parametrize("method", ["RanPAC", "Nearest class mean", "SISA"])
def test_methods_of_sums_and_of_shards_read_a_stream(stream, method):
    row = comparison.trial(stream, method, 0, Settings("Adam", 4e-3), Path(), False, True)
    assert row["accuracy"] > (0.8 if method == "RanPAC" else 0.6)
    if method == "SISA":
        assert row["bytes"] > 3 * row["network"]


def test_trials_go_beyond_an_end_and_then_into_the_widest_gap():
    tried = []

    def measure(settings):
        tried.append(settings)
        return -abs(log(settings.lr / 0.02)) - abs(log(settings.options["a"] / 0.9))

    search([("Adam", 0.001), ("Adam", 0.002)], ("a", 0.5, 1.6), 1.4, measure, trials=12, most=1.0)
    assert len(tried) == len({str(each) for each in tried}) == 12
    assert max(each.options["a"] for each in tried) == 0.8
    assert [each.lr for each in tried[4:8]] == [0.004, 0.008, 0.016, 0.064]  # steps grow beyond the first six trials
    found = max(tried, key=lambda each: -abs(log(each.lr / 0.02)) - abs(log(each.options["a"] / 0.9)))
    assert 0.015 < found.lr < 0.027
    assert not comparison.at_an_end(found, tried, METHODS["WSN"])
    assert comparison.at_an_end(tried[1], tried[:4], METHODS["WSN"])
    between = Settings("Adam", 0.0015, {"a": 0.5})  # both neighbours of .5 were tried at another learning rate
    assert not comparison.at_an_end(between, [*tried[:4], between], METHODS["WSN"])


def test_a_diverged_training_counts_as_a_trial(stream):
    assert 0 <= comparison.trial(stream, "Naive", 0, Settings("SGD", 1e9), Path(), False, True)["accuracy"] < 0.5


def test_the_script_writes_every_row_once(stream, tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.json"

    def call(*arguments):
        flags = ("--root", tmp_path, "--streams", stream, "--output", output, "--methods", "AmnesiacHAT", "Independent")
        monkeypatch.setattr("sys.argv", ["comparison", *map(str, (*flags, *arguments))])
        comparison.main()
        return json.loads(output.read_text())

    with pytest.raises(SystemExit):
        call("--test", 21)
    assert "no settings of AmnesiacHAT on 'digits' were tried" in capsys.readouterr().err
    assert len(call("--validation", 101, "--test", 21, "--own-heads")) == 7  # AmnesiacHAT's own heads are fitted ones
    assert len(call("--validation", 101)) == 19
    rows = call("--test", 21)
    assert rows == call("--test", 21)
    mine, exact = rows_tested(rows, fitted=True)
    assert set(exact["claims"]) <= comparison.BY_CONSTRUCTION
    assert exact["jsd"] == {"unlearned": 0.0, "order": 0.0}
    assert exact["linear"]["unlearned"] == exact["linear"]["same"]
    assert mine["jsd"]["unlearned"] > 0
    assert 0 < mine["network"] < mine["bytes"]
    page = output.with_suffix(".md").read_text()
    assert "| Independent, exact | " in page
    assert "| Independent, exact | " in page.split("own heads\n", 1)[1].split("##", 1)[0]


def test_heads_are_chosen_on_held_out_images():
    what = {"stream": "s", "method": "Naive", "seed": 1}
    cells = [(True, True, 0.8), (False, True, 0.9), (True, False, 0.95), (False, False, 0.7)]
    rows = [what | {"fitted": fitted, "validation": held, "accuracy": found} for fitted, held, found in cells]
    assert [row["accuracy"] for row in comparison.with_better_heads(rows, stream="s", method="Naive")] == [0.7]
    assert comparison.with_better_heads(rows, stream="s", method="EWC") == []


def test_the_figure_shows_exact_methods_as_filled_marks():
    stream = next(iter(comparison.STREAMS))
    rows = [row for row in ROWS if row["stream"] == stream]
    handles = draw(Figure().subplots(), rows, stream)
    proven = {row["method"] for row in rows_tested(rows) if "bytes" in row}
    assert handles.keys() == {name for name in proven if not METHODS[name].variant}
    filled = {name for name, points in handles.items() if len(points.get_facecolors()) and METHODS[name].obeys}
    exact = {"DisjointSubnets", "CLPU-DER++", "Independent", "Independent, narrow", "SISA", "RanPAC"}
    exact |= {"Nearest class mean"}
    assert filled == exact & proven
    for name, points in handles.items():
        found = comparison.with_better_heads(rows, method=name)
        shown = 1 - points.get_offsets()[0][1] / 100
        assert abs(shown - sum(row["accuracy"] for row in found) / len(found)) <= 1e-4


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
    methods = ("hat", "ewc")
    budget = ("--epochs", "1", "--n-train", "200", "--n-test", "100")
    rows = called("--methods", *methods, "--seeds", "0", "1", *budget, "--requests", '{"1": [0]}')
    assert [(row["method"], row["seed"]) for row in rows] == [(method, seed) for method in methods for seed in "01"]
    controls = [row for row in rows if row["method"] == "hat"]
    assert all(float(row["ad"]) == 0 for row in controls)  # it never unlearned: it is its own full model
    assert "± " in capsys.readouterr().out
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 4


def test_a_bad_request_is_refused_before_training(called):
    with pytest.raises(RequestError, match=r"after task 0.*task 3"):
        called("--requests", '{"0": [3]}', "--methods", "naive")
