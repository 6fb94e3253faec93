"""Commands for a store: trainings still to be computed, and deletion of states."""

import sys

import pytest
from support.strategies import DIGITS, brief, learn

from avalanche_amnesia import References, with_unlearning
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.runs.run_plan import plan_runs

BENCHMARK = with_unlearning(DIGITS, {1: [0], 2: [2], 3: [1]})


def test_a_plan_counts_the_trainings_to_compute(tmp_path):
    store = RunStore(tmp_path)
    plan = plan_runs(brief, BENCHMARK, store)
    # main: 5 tasks, of which only the first comes without a request, as in full runs; references: 1; 1; 3; 3, 4
    counts = {runs.what: (runs.trainings, runs.shared, runs.there, runs.to_compute) for runs in plan.runs}
    assert counts == {"main run": (5, 0, 0, 5), "full runs": (14, 10, 0, 4), "references": (4, 1, 0, 3)}
    assert plan.seconds is None
    assert store.nodes() == []


def test_a_plan_leaves_out_stored_states_and_its_count_is_right(tmp_path):
    store = RunStore(tmp_path)
    references = References(brief, BENCHMARK, store=store)
    references.reference([1])
    plan = plan_runs(brief, BENCHMARK, store)
    assert [runs.there for runs in plan.runs] == [0, 0, 1]
    assert plan.seconds > 0
    assert "references" in str(plan)
    run = learn(store.run(brief()), BENCHMARK.train_stream)
    references.full(5)
    references.reference([3, 4])
    assert run.computed + references.trainings - 1 == sum(runs.to_compute for runs in plan.runs)
    assert plan_runs(brief, BENCHMARK, store).seconds == 0


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "trained.py").write_text(
        "from test_store_commands import BENCHMARK, brief\n\ndef made_benchmark():\n    return BENCHMARK\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("trained", None)


def test_commands_plan_and_prune_a_store(script, capsys):
    store = RunStore(script / "store")
    learn(store.run(brief()), DIGITS.train_stream[:2])
    for benchmark in ("trained:BENCHMARK", "trained:made_benchmark"):
        assert main(["plan-script", str(script / "store"), "--factory", "trained:brief", "--benchmark", benchmark]) == 0
        assert "main run" in capsys.readouterr().out
    assert main(["prune", str(script / "store"), "--keep", "1G"]) == 0
    assert "0 of 2 states deleted" in capsys.readouterr().out
    assert main(["prune", str(script / "store"), "--task", "1"]) == 0
    assert "1 of 2 states deleted" in capsys.readouterr().out
    assert main(["prune", str(script / "store"), "--keep", "0"]) == 0
    assert "1 of 1 states deleted" in capsys.readouterr().out
    assert store.nodes() == []


def test_a_folder_that_is_no_store_is_refused(tmp_path, capsys):
    assert main(["prune", str(tmp_path / "absent"), "--keep", "0"]) == 2
    assert not (tmp_path / "absent").exists()
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["prune", str(tmp_path), "--keep", "0"]) == 2
    assert "thesis.tex" in capsys.readouterr().err
    for size in ("much", "-3"):
        assert main(["prune", str(tmp_path), "--keep", size]) == 2
        assert f"--keep {size!r} is no size" in capsys.readouterr().err
    assert main(["prune", str(tmp_path)]) == 2
    assert "one of --keep SIZE and --task TASK" in capsys.readouterr().err
