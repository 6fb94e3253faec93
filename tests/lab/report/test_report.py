"""The report: its numbers are those of the files, its words follow from them, and nothing in it is anybody's code."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev

import pytest
from scipy import stats
from support.report_results import FOLDER, MEASURED_LATER, another_seed, content, runs_of, runs_with

from avalanche_amnesia.evaluation import floor_ratio
from avalanche_amnesia.evaluation.resolution import distance_in_words
from avalanche_amnesia.lab.report import report_page
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import listed, over_seeds, percent, points


class Page(HTMLParser):
    """Tables by id as lists of rows of values, headings, and everything that names an address."""

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
            self._rows = self.tables[attrs.get("id")] = []  # those that are not sorted have none
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
        """Rows of a table as dicts."""
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


def test_the_accuracies_are_those_of_the_results(results, page):
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


def test_the_divergences_are_those_of_the_results(results, page):
    found = {
        (row["strategy"], int(row["after task"]), row["probe"], suffix): as_number(row[column])
        for row in page.rows("jsd-table-1")
        for suffix, column in (("", "JSD (bit)"), ("_floor_order", "floor: order"), ("_floor_seed", "floor: seed"))
    }
    for row in page.rows("jsd-table-1"):
        value, floor = as_number(row["JSD (bit)"]), as_number(row["floor: order"])
        assert as_number(row["value / order floor"]) == floor_ratio(value, floor)
        event = events(results, row["strategy"])[int(row["after task"])]
        heads = event["unlearned_accuracy"].values()
        assert as_number(row["old head"]) == pytest.approx(sum(heads) / len(heads))
        assert as_number(row["old head, retrained model"]) == event["reference_unlearned_accuracy"]
    expected = {
        (name, event["task"], probe, suffix): event["jsd"][f"{probe}{suffix}"]
        for name in results["strategies"]
        for event in events(results, name)
        for probe in ("JSD_own", "JSD_remaining")
        for suffix in ("", "_floor_order", "_floor_seed")
        if event["jsd"]
    }
    assert found == expected


@pytest.mark.parametrize(
    ("table", "column", "key"),
    [
        ("difference-table-1", "AD", "accuracy_difference"),
        ("difference-table-1", "AD, control", "accuracy_difference_control"),
        ("capacity-table-1", "before requests", "capacity_before"),
        ("capacity-table-1", "after requests", "capacity"),
    ],
)
def test_numbers_of_events_are_those_of_the_results(results, page, table, column, key):
    found = {(row["strategy"], int(row["after task"])): as_number(row[column]) for row in page.rows(table)}
    assert found == {(name, after): events(results, name)[after][key] for name, after in found}
    assert len(found) >= 10


def test_distances_stand_beside_their_floors(results, page):
    for row in page.rows("distances-table-1"):
        found = events(results, row["strategy"])[int(row["after task"])]["distances"]
        floors = [found[f"{row['distance']}_floor_{floor}"] for floor in ("order", "seed")]
        assert [as_number(row[name]) for name in ("value", "floor: order", "floor: seed")] == [
            found[row["distance"]],
            *floors,
        ]
    assert {row["distance"] for row in page.rows("distances-table-1")} == {"CKA_own", "Cosine_own", "Euclidean_own"}


@pytest.mark.parametrize(
    ("section", "unit"), [("relapse", "accuracy"), ("few_shot", "accuracy"), ("membership", "AUC")]
)
def test_readings_of_unlearned_tasks_are_those_of_the_results(results, page, section, unit):
    for row in page.rows(f"{section}-table-1"):
        event, task = events(results, row["strategy"])[int(row["after task"])], row["unlearned task"]
        assert as_number(row[unit]) == event[section][task]
        assert as_number(row[f"{unit}, retrained model"]) == event[f"{section}_reference"][task]


def test_seconds_are_those_of_the_log(runs, page):
    found = {
        (row["strategy"], int(row["after task"])): (as_number(row["to unlearn (s)"]), as_number(row["to retrain (s)"]))
        for row in page.rows("cost-table-1")
    }
    assert found == {(run.name, cost.after): (cost.unlearn, cost.retrain) for run in runs for cost in run.costs}


def test_the_matrix_shows_the_readings_of_chance_and_of_the_retrained_model(results, html):
    last = events(results, "AmnesiacHAT")[-1]
    head, reference = (f"{100 * last[of]['0']:.0f}" for of in ("unlearned_accuracy", "reference_unlearned"))
    assert f'class="framed">{head}<small>retr. {reference}</small><small>chance 50</small></td>' in html


def test_the_first_lines_say_verdict_reading_and_cost(page):
    assert "asked to forget: tasks 0, 1 and 4 of 5 (task 0 after task 1; tasks 1 and 4 after task 4)" in page.text
    assert f"AD −0.7{chr(160)}points, control −0.9{chr(160)}points" in page.text
    assert "by construction, and no test contradicts it" in page.text


def test_no_paragraph_stands_twice(html):
    told = [re.sub(r"\s+", " ", words) for words in re.findall(r"<p[^>]*>(.{60,}?)</p>", html, re.DOTALL)]
    assert len(told) > 10
    assert len(told) == len(set(told))


def test_seeds_are_shown_as_one_with_their_range(results, runs):
    page = Page(report_page([*runs, *another_seed(1), *another_seed(2)]))
    summary = page.rows("summary-table")
    assert [row["seeds"] for row in summary] == ["3", "3", "3"]
    accuracy = events(results, "EWC")[-1]["accuracy"]
    mean = sum(accuracy.values()) / len(accuracy)
    assert as_number(summary[2]["accuracy on remaining tasks"]) == pytest.approx(mean - 0.01)
    assert over_seeds(Spread(mean - 0.01, mean - 0.02, mean, 3), percent) in page.text
    assert {row["seed"] for row in page.rows("accuracy-table-1")} == {"0", "1", "2"}


def test_other_settings_are_strategies_of_their_own(runs):
    other = runs_with(lambda changed: changed["settings"]["budget"].update(epochs=5))
    names = [row["strategy"] for row in Page(report_page([*runs, *other])).rows("summary-table")]
    assert names[0] == "AmnesiacHAT (epochs 20)"
    assert names[3] == "AmnesiacHAT (epochs 5)"


def test_the_same_run_twice_is_refused(runs):
    with pytest.raises(ValueError, match="give each run once"):
        report_page([*runs, *runs])


def test_no_results_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        report_page([])


def test_what_was_not_measured_is_left_out_and_named():
    def without(changed):
        for run in changed["strategies"].values():
            for event in run["events"]:
                for key in MEASURED_LATER:
                    event.pop(key)

    page = Page(report_page(runs_with(without)))
    gone = {"relapse", "few_shot", "membership", "transfer", "owners", "overlap", "distances", "cost"}
    assert gone.isdisjoint(page.ids)
    assert {"accuracy", "old-head", "jsd", "difference", "capacity", "records", "settings"} <= set(page.ids)
    assert "Not measured in these runs: relapse, few-shot relearning, membership inference" in page.text


@pytest.mark.parametrize("key", MEASURED_LATER)
def test_a_number_that_does_not_exist_is_no_error(key):
    def without(changed):
        for event in events(changed, "AmnesiacHAT"):
            event[key] = None

    assert "<h1>" in report_page(runs_with(without)[:1])  # alone: the others have nothing that it lacks


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


def test_text_of_the_results_is_never_markup():
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


def test_no_path_of_the_machine_is_on_the_page(results):
    runs = [replace(run, folder=Path("/home/somebody/runs/demo") / run.name) for run in runs_of(results)]
    runs.append(replace(runs[0], name="alone", settings={"seed": 0}, folder=Path("/home/somebody/runs/else/alone")))
    html = report_page(runs)
    assert "somebody" not in html
    assert {"runs/demo", "else/alone"} <= {cell for table in Page(html).tables.values() for cell in table[0]}


def test_nothing_on_the_page_asks_for_anything_else(html, page):
    assert all(address.startswith("#") for address in page.addresses)
    assert {address.removeprefix("#") for address in page.addresses} <= set(page.ids)
    assert not re.search(r"https?://|@import|url\(|<link|<iframe", html)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'" in html


def test_the_same_runs_give_the_same_bytes(html):
    assert html == report_page(runs_of(content(), timings=True))


def test_a_distance_is_told_in_units_of_its_order_floor(results, page):
    last = events(results, "AmnesiacHAT")[-1]["jsd"]
    (row,) = [row for row in page.rows("summary-table") if row["strategy"] == "AmnesiacHAT"]
    assert as_number(row["JSD / order floor"]) == last["JSD_own"] / last["JSD_own_floor_order"]


def test_every_test_stands_in_a_table(results, page):
    rows = {(row["strategy"], row["test"]): row for row in page.rows("tests-table")}
    last = events(results, "EWC")[-1]
    few = rows["EWC", "few-shot relearning"]
    pairs = [(last["few_shot"][task], last["few_shot_reference"][task]) for task in last["few_shot"]]
    assert as_number(few["this model"]) == pytest.approx(sum(a for a, _ in pairs) / 3)
    assert as_number(few["retrained model (JSD: order floor)"]) == pytest.approx(sum(b for _, b in pairs) / 3)
    assert as_number(few["difference at most (95 %)"]) == pytest.approx(at_most(a - b for a, b in pairs))
    assert (few["finding"], few["tasks and seeds"]) == ("no trace", "3")


def at_most(differences):
    """Upper end of a mean's one-sided interval, from the definition."""
    found = list(differences)
    return mean(found) + stats.t.ppf(0.95, len(found) - 1) * stdev(found) / len(found) ** 0.5


def test_words_of_numbers():
    assert [points(value) for value in (0.0, 0.0001, -0.007)] == ["0.0\xa0points", "0.0\xa0points", "−0.7\xa0points"]
    told = [distance_in_words(value) for value in (0.0, 0.9e-9, 1e-9, 0.00005, 0.0108, 149.448)]
    assert told == ["below detection", "below detection", "1.0e-9", "5.0e-5", "0.011", "150"]
    assert [listed(items) for items in ([], [0], [0, 1], [0, 1, 4])] == ["", "0", "0 and 1", "0, 1 and 4"]
    assert over_seeds(None, percent) == "–"
    assert over_seeds(Spread(0.5, 0.4, 0.6, 2), percent) == "50.0\xa0% (40.0 to 60.0\xa0%)"
    assert over_seeds(Spread(0.5, 0.5, 0.5, 2), percent) == "50.0\xa0%"


def test_the_fixture_is_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 60_000
    assert set(MEASURED_LATER) <= content()["strategies"]["EWC"]["events"][0].keys()
