"""Committed result tables are made of the committed rows."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from experiments import adahat_sequence, published, published_differences, recipe, second_schedule
from experiments.mask_learning import CONTENDERS, NOTES, data, learn_mask, main, mean_and_error, run, table
from experiments.trials import best, rows_of, rows_tested

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def test_the_table_of_the_published_method_is_made_of_its_rows():
    files = sorted((RESULTS / "published").glob("seed*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())]
    assert {row["seed"] for row in rows} == {1, 2, 3, 4, 5}
    assert (RESULTS / "published.md").read_text() == published.table(rows)


def test_the_table_of_the_authors_code_is_made_of_its_rows(monkeypatch):
    monkeypatch.chdir(RESULTS.parents[1])
    assert (RESULTS / "published_differences.md").read_text() == published_differences.table()


def test_tables_of_recipe_and_schedule_are_made_of_their_rows_and_of_equally_many_trials():
    rows = rows_of(recipe.OUTPUT)
    for script in (recipe, second_schedule, adahat_sequence):
        assert script.OUTPUT.with_suffix(".md").read_text() == script.table(rows_of(script.OUTPUT))
    names = ("stream", "method", "recipe")
    assert set(Counter(tuple(row[name] for name in names) for row in rows if row["validation"]).values()) == {6}
    for row in rows_tested(rows):
        assert row["seed"] in range(31, 36)
        assert row["settings"] == best(rows, "settings", **{name: row[name] for name in names})


COMMITTED = json.loads((RESULTS / "mask_learning.json").read_text())


def committed(name: str, weight: float) -> dict:
    return next(row for row in COMMITTED["rows"] if (row["name"], row["weight"]) == (name, weight))


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_committed_counts_are_reproduced(contender):
    """Moving every input by an ulp changes none of these counts."""
    x, y = data(COMMITTED["seed"])
    row = committed(contender.name, 0.75)
    settings = {name: COMMITTED[name] for name in ("seed", "clamp", "epochs")}
    outcome = learn_mask(contender, x, y, net=0, weight=0.75, **settings)
    assert outcome.finite
    assert outcome.by_epoch == row["by_epoch"][0]
    assert outcome.by_batch == row["by_batch"][0]


def test_the_committed_table_is_made_of_the_committed_counts():
    assert (RESULTS / "mask_learning.md").read_text() == f"{NOTES}\n{table(COMMITTED['rows'])}\n"
    assert all(len(row["by_epoch"]) == len(row["by_batch"]) == COMMITTED["nets"] == 100 for row in COMMITTED["rows"])


def test_failures_are_counted_but_not_averaged():
    mean, error, never = mean_and_error([25, 75, None])
    assert (mean, never) == (50.0, 1)
    assert error == pytest.approx(math.sqrt(1250) / math.sqrt(2))
    assert math.isnan(mean_and_error([None, None])[0])
    rows = run(nets=2, seed=0, weights=[0.75], clamp=50.0, epochs=1)
    assert next(row for row in rows if row["name"] == "HAT")["by_epoch"] == [None, None]
    assert "| 2/2 |" in table(rows)


def test_the_command_line_writes_the_printed_table(tmp_path, capsys):
    main(["--nets", "2", "--weights", "0.75", "--epochs", "2", "--output", str(tmp_path / "new" / "few")])
    assert (tmp_path / "new" / "few.md").read_text() == f"{NOTES}\n{capsys.readouterr().out}"
    document = json.loads((tmp_path / "new" / "few.json").read_text())
    assert (document["nets"], document["seed"], len(document["rows"])) == (2, 0, 4)
    assert document["rows"][1]["by_epoch"] == committed("HAT-CL", 0.75)["by_epoch"][:2]
