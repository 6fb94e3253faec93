"""The report page: its numbers are those of the logs, no text becomes code, and charts show numbers at their places."""

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import mean

import pytest
from bs4 import BeautifulSoup
from support.report_results import FOLDER, another_seed, runs_of_demo

from avalanche_amnesia.evaluation.figures import COLOURS
from avalanche_amnesia.lab.report.page import _environment, report_page
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds, percent


class Page:
    """Tables by id, text, tags and addresses of a page."""

    def __init__(self, html):
        page = BeautifulSoup(html, "html.parser")
        tags, linking = page.find_all(True), ("src", "href", "srcset", "data", "action")
        self.text, self.tags = page.get_text(), [tag.name for tag in tags]
        self.ids = [tag["id"] for tag in tags if "id" in tag.attrs]
        self.addresses = [tag[name] for tag in tags for name in linking if name in tag.attrs]
        self.tables = {table.get("id"): [self.cells(row) for row in table("tr")] for table in page("table")}

    @staticmethod
    def cells(row):
        """Return the exact values of cells that have one, and the texts of the others."""
        return [cell.get("data-v", cell.get_text().strip()) for cell in row(["td", "th"])]

    def rows(self, table):
        """Return the rows of a table as dicts."""
        head, *rows = self.tables[table]
        return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def runs():
    return runs_of_demo()


@pytest.fixture(scope="module")
def html(runs):
    return report_page(runs)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def assert_reviewed(text, name):
    """Compare with a reviewed file: delete it to make a new one, and review the difference."""
    golden = FOLDER / name
    if not golden.exists():
        golden.write_text(text)
    assert text == golden.read_text()


def rounded(cell):
    try:
        return f"{float(cell):.6g}"
    except ValueError:
        return cell


def test_the_tables_of_the_page_are_those_reviewed(page):
    tables = ((name, rows) for name, rows in page.tables.items() if name is not None)
    shown = "".join(
        f"{name}\n" + "".join("\t".join(map(rounded, row)).rstrip() + "\n" for row in rows) + "\n"
        for name, rows in tables
    )
    assert_reviewed(shown, "tables.txt")


def test_the_charts_of_the_page_are_those_reviewed(runs):
    """Legends, ticks, requests, lines, the ranges over two seeds, marks, and the numbers in words."""
    others = another_seed(1)
    for run in others:
        for moment in run.moments:
            moment.numbers["JSD_own"] = {task: 3 * jsd for task, jsd in moment.numbers.get("JSD_own", {}).items()}
    page = BeautifulSoup(report_page([*runs, *others]), "html.parser")
    parts = "figcaption, .legend li, .ticks span, .request, .band, polyline, .places span, [x$='%'], figure li"
    shown = [(tag.name, *sorted(tag.attrs.items()), tag.get_text()) for tag in page.select(parts)]
    assert_reviewed("\n".join(map(str, shown)) + "\n", "charts.txt")


def test_the_page_shows_verdicts_requests_and_the_matrix_in_words(runs, html, page):
    (last,) = (run.last for run in runs if run.name == "AmnesiacHAT")
    beside = ("UnlearnedAccuracy", "UnlearnedAccuracy_reference")
    head, reference = (f"{100 * last.number(name, 0):.0f}" for name in beside)
    assert f'class="framed">{head}<small>retr. {reference}</small><small>chance 50</small></td>' in html
    assert "asked to forget: tasks 0, 1 and 4 of 5 (task 0 after task 1; tasks 1 and 4 after task 4)" in page.text
    assert f"AD −0.7{chr(160)}points, control −0.9{chr(160)}points" in page.text
    assert "by construction, and no test contradicts it" in page.text


def test_several_seeds_are_one_row_with_a_range(runs):
    page = Page(report_page([*runs, *another_seed(1), *another_seed(2)]))
    summary = page.rows("summary-table")
    assert [row["seeds"] for row in summary] == ["3", "3", "3"]
    (accuracy,) = (run.last.accuracy for run in runs if run.name == "EWC")
    first = mean(accuracy.values())
    assert float(summary[2]["accuracy on remaining tasks"]) == pytest.approx(first - 0.01)
    assert over_seeds(Spread(first - 0.01, first - 0.02, first), percent) in page.text
    assert {row["seed"] for row in page.rows("transfer-table-1")} == {"0", "1", "2"}
    stopped = [replace(run, moments=run.moments[:1], ended=False) for run in another_seed(3)]  # no run at the end
    rows = Page(report_page([*runs, *another_seed(1), *another_seed(2), *stopped])).rows("summary-table")
    accuracies = [[row["accuracy on remaining tasks"] for row in each] for each in (rows, summary)]
    assert accuracies[0] == accuracies[1]


def test_runs_with_other_settings_are_rows_of_their_own_and_equal_runs_are_refused(runs):
    other = runs_of_demo("changed")
    for run in other:
        run.settings["budget"]["epochs"] = 5
    names = [row["strategy"] for row in Page(report_page([*runs, *other])).rows("summary-table")]
    assert (names[0], names[3]) == ("AmnesiacHAT (epochs 20)", "AmnesiacHAT (epochs 5)")
    for refused, words in (([*runs, *runs], "give each run once"), ([], "at least one")):
        with pytest.raises(ValueError, match=words):
            report_page(refused)


def without(run, is_missing, **changed):
    """Return a run that lacks some metrics, and has other attributes in all of its moments."""

    def rest(numbers):
        return {name: of for name, of in numbers.items() if not is_missing(name)}

    moments = [replace(m, numbers=rest(m.numbers), **changed) for m in run.moments]
    return replace(run, moments=moments)


EARLY = ("Top1_Acc_Exp", "UnlearnedAccuracy", "UnlearnedAccuracy_reference", "AccuracyDifference", "Capacity")


def test_sections_without_measurements_are_left_out_and_named(runs):
    few = [without(run, lambda name: name not in EARLY and "JSD" not in name) for run in runs]
    page = Page(report_page([replace(run, costs=()) for run in few]))
    absent = {"relapse", "few_shot", "membership", "transfer"}
    assert absent.isdisjoint(page.ids)
    assert {"accuracy", "old-head", "jsd", "difference", "capacity", "records", "settings"} <= set(page.ids)
    assert "Not measured in these runs: relapse, few-shot relearning, membership inference" in page.text


def test_a_missing_number_is_no_error(runs):
    run = runs[0]  # alone: the other runs lack no number
    names = {name.partition("/")[0] for name in run.last.numbers if "_floor" not in name and "_ratio" not in name}
    for missing in names:
        assert "<h1>" in report_page([without(run, lambda name, missing=missing: name.partition("/")[0] == missing)])


def test_a_stream_without_requests_has_a_report(runs):
    gone = {"unlearned": (), "unlearned_now": (), "claim": None}
    unasked = [without(run, lambda name: name.startswith(("Unlearned", "JSD", "Relapse")), **gone) for run in runs]
    page = Page(report_page([replace(run, records=()) for run in unasked]))
    assert "nothing is unlearned" in page.text
    assert "records" not in page.ids


ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_text_of_the_results_never_becomes_markup():
    runs = runs_of_demo(ATTACK)
    run = replace(runs[0], name=ATTACK)
    run.records[0]["plan"]["reasons"] = run.records[0]["purged"] = [ATTACK]
    for moment in run.moments:
        moment.numbers.update({name: {None: 0.5} for name in (f"JSD_{ATTACK}", f"JSD_{ATTACK}_tasks")})
    for each in runs:
        each.settings["data"] = each.versions["torch"] = ATTACK
    page = report_page([*runs[1:], run])
    parsed = Page(page)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert ATTACK not in page
    assert parsed.text.count(ATTACK) >= 10


def test_the_page_has_no_paths_of_the_machine():
    runs = [replace(run, folder=Path("/home/somebody/runs/demo") / run.name) for run in runs_of_demo()]
    runs.append(replace(runs[0], name="alone", settings={"seed": 0}, folder=Path("/home/somebody/runs/else/alone")))
    assert "somebody" not in report_page(runs)


def test_the_page_loads_nothing_and_its_links_stay_on_it(html, page):
    assert all(address.startswith("#") for address in page.addresses)
    assert {address.removeprefix("#") for address in page.addresses} <= set(page.ids)
    assert not re.search(r"https?://|@import|url\(|<link|<iframe", html)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'" in html


def test_equal_runs_give_equal_bytes(html):
    assert html == report_page(runs_of_demo())


def test_charts_have_the_colours_of_the_page_in_light_and_dark_mode() -> None:
    style = resources.files("avalanche_amnesia.lab.report").joinpath("templates/page.css").read_text()
    light, dark, paper = (dict(re.findall(r"--(\w+): (#\w{6});", part)) for part in style.split(":root {")[1:4])
    assert light == paper
    assert light.keys() == dark.keys()
    assert COLOURS.items() - {("page", COLOURS["page"])} <= light.items()


def test_every_role_has_its_own_mark_besides_its_colour() -> None:
    drawn_marks = str(_environment().get_template("charts.jinja").module.marks())
    marks = dict(re.findall(r'id="mark-(\w+)" (.*?)/>', drawn_marks))
    shapes = {re.sub(r' (fill|stroke)="var\(.*?\)"', "", shape) for shape in marks.values()}
    assert marks.keys() == {"here", "retrained", "never", "chance", "order", "seed"}
    assert len(shapes) == len(marks)
