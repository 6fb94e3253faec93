"""The report page: its numbers are those of the logs, its text follows from them, and no text becomes code."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev

import pytest
from scipy import stats
from support.report_results import MEASURED_LATER, another_seed, content, runs_of, runs_with

from avalanche_amnesia.evaluation import floor_ratio
from avalanche_amnesia.evaluation.resolution import distance_in_words
from avalanche_amnesia.lab.report.page import report_page
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import listed, over_seeds, percent, points, times


class Page(HTMLParser):
    """Tables by id, text, tags and addresses of a page."""

    def __init__(self, html):
        super().__init__()
        self.tables, self.addresses, self.ids, self.tags, self.text = {}, [], [], [], ""
        self._rows = self._cell = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.addresses += [attrs[name] for name in ("src", "href", "srcset", "data", "action") if name in attrs]
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "table":
            self._rows = self.tables[attrs.get("id")] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = [attrs.get("data-value"), ""]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            value, text = self._cell
            self._rows[-1].append(text.strip() if value is None else value)
            self._cell = None

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell[1] += data

    def rows(self, table):
        """Return the rows of a table as dicts."""
        head, *rows = self.tables[table]
        return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def results():
    return content()


@pytest.fixture(scope="module")
def runs(results):
    return runs_of(results, timings=True)


@pytest.fixture(scope="module")
def html(runs):
    return report_page(runs)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def events(results, name):
    return results["strategies"][name]["events"]


def as_number(text):
    return None if text == "" else float(text)


def test_the_page_has_the_accuracies_of_the_results(results, page):
    found = {}
    for row in page.rows("accuracy-table-1"):
        place = (row["strategy"], int(row["after task"]), row["tested on task"])
        found[place] = [as_number(row[name]) for name in ("accuracy", "retrained model", "never unlearned", "chance")]
    expected = {}
    for name in results["strategies"]:
        for event in events(results, name):
            for task, value in event["accuracy"].items():
                reference, full = event["reference_accuracy"][task], event["full_accuracy"][task]
                expected[name, event["task"], task] = [value, reference, full, None]
            for task, value in event["unlearned_accuracy"].items():
                reference = event["reference_unlearned"][task]
                expected[name, event["task"], task] = [value, reference, None, event["chance"][task]]
    assert found == expected


def test_the_page_has_the_divergences_of_the_results(results, page):
    expected = {(n, e["task"]) for n in results["strategies"] for e in events(results, n) if e["jsd"]}
    assert {(row["strategy"], int(row["after task"])) for row in page.rows("jsd-table-1")} == expected
    for row in page.rows("jsd-table-1"):
        event, probe = events(results, row["strategy"])[int(row["after task"])], row["probe"]
        for column, suffix in (("JSD (bit)", ""), ("floor: order", "_floor_order"), ("floor: seed", "_floor_seed")):
            assert as_number(row[column]) == event["jsd"][probe + suffix]
        value, floor = as_number(row["JSD (bit)"]), as_number(row["floor: order"])
        assert as_number(row["value / order floor"]) == floor_ratio(value, floor)
        assert as_number(row["old head"]) == pytest.approx(mean(event["unlearned_accuracy"].values()))
        assert as_number(row["old head, retrained model"]) == event["reference_unlearned_accuracy"]


COLUMNS = [
    ("difference-table-1", "AD", "accuracy_difference"),
    ("difference-table-1", "AD, control", "accuracy_difference_control"),
    ("capacity-table-1", "before requests", "capacity_before"),
    ("capacity-table-1", "after requests", "capacity"),
]


def test_the_page_has_the_other_numbers_of_the_results(results, runs, page):
    for table, column, key in COLUMNS:
        found = {(row["strategy"], int(row["after task"])): as_number(row[column]) for row in page.rows(table)}
        assert found == {(name, after): events(results, name)[after][key] for name, after in found}
        assert len(found) >= 10
    for section, unit in (("relapse", "accuracy"), ("few_shot", "accuracy"), ("membership", "AUC")):
        for row in page.rows(f"{section}-table-1"):
            event, task = events(results, row["strategy"])[int(row["after task"])], row["unlearned task"]
            assert as_number(row[unit]) == event[section][task]
            assert as_number(row[f"{unit}, retrained model"]) == event[f"{section}_reference"][task]
    for row in page.rows("distances-table-1"):
        found, name = events(results, row["strategy"])[int(row["after task"])]["distances"], row["distance"]
        for column, suffix in (("value", ""), ("floor: order", "_floor_order"), ("floor: seed", "_floor_seed")):
            assert as_number(row[column]) == found[name + suffix]
    assert {row["distance"] for row in page.rows("distances-table-1")} == {"CKA_own", "Cosine_own", "Euclidean_own"}
    seconds = [
        (row["strategy"], int(row["after task"]), float(row["to unlearn (s)"]), float(row["to retrain (s)"]))
        for row in page.rows("cost-table-1")
    ]
    logged = [(run.name, cost.after, cost.unlearn, cost.retrain) for run in runs for cost in run.costs]
    assert sorted(seconds) == sorted(logged)
    last = events(results, "AmnesiacHAT")[-1]["jsd"]
    (row,) = [row for row in page.rows("summary-table") if row["strategy"] == "AmnesiacHAT"]
    assert as_number(row["JSD / order floor"]) == last["JSD_own"] / last["JSD_own_floor_order"]


def test_the_page_shows_verdicts_requests_and_the_matrix_in_words(results, html, page):
    last = events(results, "AmnesiacHAT")[-1]
    head, reference = (f"{100 * last[of]['0']:.0f}" for of in ("unlearned_accuracy", "reference_unlearned"))
    assert f'class="framed">{head}<small>retr. {reference}</small><small>chance 50</small></td>' in html
    assert "asked to forget: tasks 0, 1 and 4 of 5 (task 0 after task 1; tasks 1 and 4 after task 4)" in page.text
    assert f"AD −0.7{chr(160)}points, control −0.9{chr(160)}points" in page.text
    assert "by construction, and no test contradicts it" in page.text


def test_several_seeds_are_one_row_with_a_range(results, runs):
    page = Page(report_page([*runs, *another_seed(1), *another_seed(2)]))
    summary = page.rows("summary-table")
    assert [row["seeds"] for row in summary] == ["3", "3", "3"]
    accuracy = events(results, "EWC")[-1]["accuracy"]
    first = mean(accuracy.values())
    assert as_number(summary[2]["accuracy on remaining tasks"]) == pytest.approx(first - 0.01)
    assert over_seeds(Spread(first - 0.01, first - 0.02, first, 3), percent) in page.text
    assert {row["seed"] for row in page.rows("accuracy-table-1")} == {"0", "1", "2"}


def test_runs_with_other_settings_are_rows_of_their_own_and_equal_runs_are_refused(runs):
    other = runs_with(lambda changed: changed["settings"]["budget"].update(epochs=5))
    names = [row["strategy"] for row in Page(report_page([*runs, *other])).rows("summary-table")]
    assert (names[0], names[3]) == ("AmnesiacHAT (epochs 20)", "AmnesiacHAT (epochs 5)")
    for refused, words in (([*runs, *runs], "give each run once"), ([], "at least one")):
        with pytest.raises(ValueError, match=words):
            report_page(refused)


def test_sections_without_measurements_are_left_out_and_named():
    def without(changed):
        for run in changed["strategies"].values():
            for event in run["events"]:
                for key in MEASURED_LATER:
                    event.pop(key)

    page = Page(report_page(runs_with(without)))
    absent = {"relapse", "few_shot", "membership", "transfer", "owners", "overlap", "distances", "cost"}
    assert absent.isdisjoint(page.ids)
    assert {"accuracy", "old-head", "jsd", "difference", "capacity", "records", "settings"} <= set(page.ids)
    assert "Not measured in these runs: relapse, few-shot relearning, membership inference" in page.text


def test_a_missing_number_is_no_error():
    for key in MEASURED_LATER:

        def without(changed, key=key):
            for event in events(changed, "AmnesiacHAT"):
                event[key] = None

        assert "<h1>" in report_page(runs_with(without)[:1])  # alone: the other runs lack no number


def test_a_stream_without_requests_has_a_report():
    def without(changed):
        for run in changed["strategies"].values():
            run["unlearnings"] = []
            for event in run["events"]:
                event.update(unlearned=[], unlearned_now=[], claim=None, unlearned_accuracy={}, jsd={}, relapse={})

    page = Page(report_page(runs_with(without)))
    assert "nothing is unlearned" in page.text
    assert "records" not in page.ids


ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_text_of_the_results_never_becomes_markup():
    def attacked(changed):
        run = changed["strategies"].pop("AmnesiacHAT")
        run["unlearnings"][0]["plan"]["reasons"] = [ATTACK]
        run["unlearnings"][0]["purged"] = [ATTACK]
        for event in run["events"]:
            event["distances"] = {f"CKA_{ATTACK}": 0.5}
            event["jsd"][f"JSD_{ATTACK}"] = 0.5
            event["owners"] = event["owners_before"] = {ATTACK: {"0": 0.5, "free": 0.5}}
        changed["strategies"][ATTACK] = run
        changed["settings"]["data"] = changed["versions"]["torch"] = ATTACK

    page = report_page(runs_with(attacked, folder=ATTACK))
    parsed = Page(page)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert ATTACK not in page
    assert parsed.text.count(ATTACK) >= 10


def test_the_page_has_no_paths_of_the_machine(results):
    runs = [replace(run, folder=Path("/home/somebody/runs/demo") / run.name) for run in runs_of(results)]
    runs.append(replace(runs[0], name="alone", settings={"seed": 0}, folder=Path("/home/somebody/runs/else/alone")))
    html = report_page(runs)
    assert "somebody" not in html
    assert {"runs/demo", "else/alone"} <= {cell for table in Page(html).tables.values() for cell in table[0]}


def test_the_page_loads_nothing_and_its_links_stay_on_it(html, page):
    assert all(address.startswith("#") for address in page.addresses)
    assert {address.removeprefix("#") for address in page.addresses} <= set(page.ids)
    assert not re.search(r"https?://|@import|url\(|<link|<iframe", html)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'" in html


def test_equal_runs_give_equal_bytes(html):
    assert html == report_page(runs_of(content(), timings=True))


def test_the_table_of_tests_has_their_differences_and_findings(results, page):
    rows = {(row["strategy"], row["test"]): row for row in page.rows("tests-table")}
    last = events(results, "EWC")[-1]
    few = rows["EWC", "few-shot relearning"]
    pairs = [(last["few_shot"][task], last["few_shot_reference"][task]) for task in last["few_shot"]]
    assert as_number(few["this model"]) == pytest.approx(sum(a for a, _ in pairs) / 3)
    assert as_number(few["retrained model (JSD: order floor)"]) == pytest.approx(sum(b for _, b in pairs) / 3)
    assert as_number(few["difference at most (95 %)"]) == pytest.approx(at_most(a - b for a, b in pairs))
    assert (few["finding"], few["tasks and seeds"]) == ("no trace", "3")


def at_most(differences):
    """Return the upper end of a mean's one-sided interval by its definition."""
    found = list(differences)
    return mean(found) + stats.t.ppf(0.95, len(found) - 1) * stdev(found) / len(found) ** 0.5


def test_numbers_are_written_in_words():
    assert [points(value) for value in (0.0, 0.0001, -0.007)] == ["0.0\xa0points", "0.0\xa0points", "−0.7\xa0points"]
    assert [times(value) for value in (1.84, 149.4, 12345.6)] == ["1.8\xa0×", "150\xa0×", "12,000\xa0×"]
    told = [distance_in_words(value) for value in (0.0, 0.9e-9, 1e-9, 0.00005, 0.0108, 149.448)]
    assert told == ["below detection", "below detection", "1.0e-9", "5.0e-5", "0.011", "150"]
    assert [listed(items) for items in ([], [0], [0, 1], [0, 1, 4])] == ["", "0", "0 and 1", "0, 1 and 4"]
    assert over_seeds(None, percent) == "–"
    assert over_seeds(Spread(0.5, 0.4, 0.6, 2), percent) == "50.0\xa0% (40.0 to 60.0\xa0%)"
    assert over_seeds(Spread(0.5, 0.5, 0.5, 2), percent) == "50.0\xa0%"
