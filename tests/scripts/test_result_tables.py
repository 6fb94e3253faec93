"""Committed result tables are made of the committed rows."""

import json
from pathlib import Path

import pytest

from experiments import published, published_differences

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def rows_of(*files):
    return [row for file in files for row in json.loads(file.read_text())]


def test_the_table_of_the_published_method_is_made_of_its_rows():
    rows = rows_of(*sorted((RESULTS / "published").glob("seed*.json")))
    assert {row["seed"] for row in rows} == {1, 2, 3, 4, 5}
    assert (RESULTS / "published.md").read_text() == published.table(rows)


def test_the_table_of_the_authors_code_is_made_of_its_rows(monkeypatch):
    monkeypatch.chdir(RESULTS.parents[1])
    assert (RESULTS / "published_differences.md").read_text() == published_differences.table()


@pytest.mark.parametrize("variant", list(published.VARIANTS)[1:])
def test_the_default_keeps_more_accuracy_than_a_published_variant_on_every_seed(variant):
    rows = rows_of(*sorted((RESULTS / "published").glob("seed*.json")))
    remaining = {(row["variant"], row["seed"]): row["remaining"] for row in rows}
    assert all(remaining["default", seed] > remaining[variant, seed] for seed in range(1, 6))
