"""The report: its numbers are those of the files, its words follow from them, and nothing in it is anybody's code."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.report_results import FOLDER, MEASURED_LATER, another_seed, content, runs_of, runs_with

from avalanche_amnesia.evaluation import distance_in_words, floor_ratio
from avalanche_amnesia.lab.report import report_page
from avalanche_amnesia.lab.report.answers import answer, jsd_reading
from avalanche_amnesia.lab.report.reading import Spread, entries
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
            self._rows = self.tables[attrs["id"]] = []
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


def test_the_matrix_shows_the_readings_of_chance_and_of_the_retrained_model(results, page):
    last = events(results, "AmnesiacHAT")[-1]
    head, reference = last["unlearned_accuracy"]["0"], last["reference_unlearned"]["0"]
    told = f"after task 4, task 0: {percent(head)} through its old head, on the retrained model {percent(reference)}"
    assert f"{told}, chance {percent(0.5)}" in page.text


def test_every_strategy_is_answered_in_plain_words(runs):
    hat, pools, ewc = (answer(entry) for entry in entries(runs))
    assert [each.verdict for each in (hat, pools, ewc)] == ["clear", "exact", "clear"]
    assert hat.forgotten == "Tasks 0, 1 and 4 of 5 (task 0 after task 1; tasks 1 and 4 after task 4)."
    assert "bit for bit" in pools.really
    assert "Not proven" in ewc.really
    assert [item.finding for item in hat.evidence if item.check == "old classifier"] == ["open"]
    assert "old classifier and JSD can't tell" in hat.really
    assert f"−0.7{chr(160)}points" in " ".join(hat.cost)
    assert "free capacity from 0.450 to 0.640" in " ".join(hat.cost)


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
    assert "There was nothing to forget." in page.text
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


def test_a_divergence_is_read_beside_its_floors():
    assert jsd_reading(0.2, 0.01, 0.1)[0] == "trace"
    for value, order, seed, words in (
        (0.0, 0.0, 0.1, "clears nothing"),  # a JSD never clears: it does not see small residues
        (0.05, 0.01, 0.1, "above its order floor"),
        (0.05, None, 0.1, "the wide one"),
        (0.2, None, None, "no floor was measured"),
    ):
        finding, told = jsd_reading(value, order, seed)
        assert finding == "open"
        assert words in told


def test_a_distance_is_told_in_units_of_its_order_floor(results, page):
    last = events(results, "AmnesiacHAT")[-1]["jsd"]
    ratio = last["JSD_own"] / last["JSD_own_floor_order"]
    assert f"{ratio:.1f}{chr(160)}× its order floor" in page.text
    (row,) = [row for row in page.rows("summary-table") if row["strategy"] == "AmnesiacHAT"]
    assert as_number(row["JSD / order floor"]) == ratio


@pytest.mark.parametrize(
    ("readings", "finding"),
    [
        ((0.5, 0.53, 0.48), "clear"),
        ((0.58, 0.59, 0.57), "trace"),  # the tasks agree
        ((0.70, 0.55, 0.50), "open"),  # they don't
        ((0.95, 0.60, 0.60), "trace"),  # too far for any chance
        ((0.40, 0.45, 0.42), "clear"),
    ],
)
def test_an_old_head_tells_of_a_trace_where_tasks_agree(readings, finding):
    def changed(content):
        last = content["strategies"]["EWC"]["events"][-1]
        last["unlearned_accuracy"] = dict(zip(("0", "1", "4"), readings, strict=True))
        last["reference_unlearned"] = {"0": 0.5, "1": 0.5, "4": 0.5}
        last["reference_unlearned_accuracy"] = 0.5

    ewc = [answer(entry) for entry in entries(runs_with(changed))][-1]
    assert [item.finding for item in ewc.evidence if item.check == "old classifier"] == [finding]
    assert ewc.verdict == ("trace" if finding == "trace" else "clear")


def test_one_task_that_is_read_far_better_leaves_it_undecided():
    def one_task(changed):
        last = changed["strategies"]["EWC"]["events"][-1]
        last["unlearned_accuracy"] = {"0": 0.45, "1": 0.45, "4": 0.65}
        last["reference_unlearned"] = {"0": 0.5, "1": 0.5, "4": 0.5}
        last["reference_unlearned_accuracy"] = 0.5

    found = next(e for e in entries(runs_with(one_task)) if e.name == "EWC")
    first = answer(found).evidence[0]
    assert first.finding == "open"
    assert "far more on task 4" in first.words


def test_one_approximate_record_makes_the_answer_approximate():
    def one_record(changed):
        changed["strategies"]["AmnesiacHAT pools"]["unlearnings"][0]["plan"]["claim"] = "approximate"

    pools = next(e for e in entries(runs_with(one_record)) if e.name == "AmnesiacHAT pools")
    assert answer(pools).verdict != "exact"


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
