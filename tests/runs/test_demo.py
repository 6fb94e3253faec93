"""The main job: the same results for the same seed, everything it promises in its folder, errors that say why."""

import io
import json

import pytest
from PIL import Image
from rich.console import Console

from avalanche_amnesia.logging import read_offline_run
from avalanche_amnesia.runs.command_line import main
from avalanche_amnesia.runs.demo import REQUESTS, run_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    runs = run_demo(out, epochs=2, console=Console(file=printed, width=80))
    return out, runs, printed.getvalue()


@pytest.mark.slow
def test_results_made_again_with_the_same_seed_are_the_same_bytes(demo, tmp_path):
    out, _, _ = demo
    run_demo(tmp_path, epochs=2, console=Console(file=io.StringIO()))
    assert (tmp_path / "results.json").read_bytes() == (out / "results.json").read_bytes()


def test_results_hold_every_number_of_every_event(demo):
    out, runs, _ = demo
    strategies = json.loads((out / "results.json").read_text())["strategies"]
    assert list(strategies) == ["AmnesiacHAT", "EWC", "LwF"] == [run.name for run in runs]
    for name, results in strategies.items():
        events = results["events"]
        assert [event["unlearned_now"] for event in events] == [REQUESTS.get(t, []) for t in range(5)]
        last = events[-1]
        assert last["remaining"] == [2, 3]
        assert set(last["accuracy"]) == {"2", "3"}
        assert set(last["unlearned_accuracy"]) == {"0", "1", "4"}
        assert 0 <= last["reference_unlearned_accuracy"] <= 1
        assert events[0]["reference_unlearned_accuracy"] is None
        expected = {
            f"JSD_{probe}{floor}" for probe in ("own", "remaining") for floor in ("", "_floor_order", "_floor_seed")
        }
        assert set(last["jsd"]) == expected
        assert (last["capacity"] is not None) == (name == "AmnesiacHAT")
        assert [record["plan"]["tasks"] for record in results["unlearnings"]] == [[0], [1], [4]]
        assert all(
            change["before"] != change["after"] for record in results["unlearnings"] for change in record["changes"]
        )


def test_the_mean_accuracy_is_that_of_the_remaining_tasks(demo):
    _, runs, _ = demo
    for run in runs:
        last = run.observations[-1]
        assert last.mean_accuracy == pytest.approx((last.accuracy[2] + last.accuracy[3]) / 2)


def test_seconds_are_kept_apart_from_results(demo):
    out, runs, _ = demo
    assert "seconds" not in (out / "results.json").read_text()
    timings = json.loads((out / "timings.json").read_text())
    for run in runs:
        after_two, after_four, after_all = timings[run.name]
        assert [timing["after_task"] for timing in timings[run.name]] == [1, 3, 4]
        assert all(timing["unlearn"] > 0 for timing in timings[run.name])
        # The last task is unlearned as soon as it is learned: what remains, and so its reference, is the one before.
        assert 0 < after_two["retrain"] != after_four["retrain"] == after_all["retrain"]


def test_figures_and_offline_runs_lie_in_the_folder(demo):
    out, runs, _ = demo
    for figure in ("accuracy_matrix.png", "masks.png", "capacity.png"):
        assert min(Image.open(out / figure).size) > 200
    offline = [read_offline_run(path) for path in (out / "wandb").glob("offline-run-*")]
    assert sorted(run.name for run in offline) == ["AmnesiacHAT", "EWC", "LwF"]
    assert {run.group for run in offline} == {"demo"}
    amnesiac = next(run for run in offline if run.name == "AmnesiacHAT")
    logged = [row["JSD_own/eval_phase/test_stream"] for row in amnesiac.rows if "JSD_own/eval_phase/test_stream" in row]
    assert logged[-1] == pytest.approx(runs[0].observations[-1].jsd["JSD_own"])
    assert amnesiac.metrics["JSD_own/eval_phase/test_stream"] == "event"


def test_tables_fit_an_ordinary_terminal(demo):
    _, _, printed = demo
    assert "…" not in printed
    assert "At the end of the stream" in printed
    assert "results.json" in printed


def test_missing_data_is_an_error_in_words_and_leaves_nothing(tmp_path, capsys):
    assert main(["demo", "--data-root", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "MNIST" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_impossible_budget_is_refused(tmp_path, capsys):
    assert main(["demo", "--epochs", "0", "--out", str(tmp_path / "out")]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_job_runs_on_mnist(data_root, tmp_path, monkeypatch):
    import avalanche_amnesia.runs.demo as module

    full = module.SplitMNIST
    monkeypatch.setattr(module, "SplitMNIST", lambda **options: full(n_train=1000, n_test=500, **options))
    runs = run_demo(tmp_path, data_root=str(data_root), epochs=1, console=Console(file=io.StringIO()))
    assert runs[0].observations[-1].remaining == (2, 3)
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["data"] == "Split MNIST"
