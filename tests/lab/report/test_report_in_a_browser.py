"""The report in a browser: no errors, no requests, accessible names, contrast, paper, sorting and CSV."""

import csv
import io
import shutil

import pytest
from playwright.sync_api import sync_playwright
from support.report_results import another_seed, runs_of_demo

from avalanche_amnesia.lab.report.page import report_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install the package chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

DIM_TEXT = """() => {
  // Every text with a contrast to its background below WCAG's 4.5 : 1.
  const parsed = (colour) => (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const luminance = (rgb) => {
    const linear = (c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.slice(0, 3).map((c) => linear(c / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const mixed = (top, alpha, under) => [0, 1, 2].map((n) => alpha * top[n] + (1 - alpha) * under[n]);
  const behind = (element, x, y) => {
    const stack = document.elementsFromPoint(x, y);
    const layers = [];
    for (const other of stack.slice(stack.indexOf(element))) {
      const style = getComputedStyle(other);
      const drawn = other instanceof SVGElement && !["svg", "g", "text"].includes(other.localName);
      const colour = drawn ? style.fill : style.backgroundColor;
      if (colour === "none" || other === element && other.localName === "text") continue;
      const [r, g, b, a = 1] = parsed(colour);
      if (a * style.opacity > 0) layers.push([[r, g, b], a * style.opacity]);
    }
    return layers.reverse().reduce((under, [rgb, alpha]) => mixed(rgb, alpha, under), [255, 255, 255]);
  };
  for (const part of document.querySelectorAll("details")) part.open = true;
  for (const part of document.querySelectorAll(".scroll")) part.style.maxHeight = "none";
  const found = [], seen = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest("script, title, desc")) continue;
    element.scrollIntoView({block: "center", inline: "center"});
    const range = document.createRange();
    range.selectNodeContents(element);
    const box = range.getClientRects()[0] ?? element.getBoundingClientRect();
    if (!box.width) continue;
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const under = behind(element, box.x + box.width / 2, box.y + box.height / 2);
    const [a, b] = [luminance(parsed(ink)), luminance(under)].sort((one, other) => other - one);
    seen.push(element.localName);
    if ((a + .05) / (b + .05) < 4.5) found.push([element.textContent.trim(), ink, under, (a + .05) / (b + .05)]);
  }
  return {found, seen: seen.length, drawn: seen.filter((name) => name === "text").length};
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(report_page([*runs_of_demo(), *another_seed(1)]))
    return file.as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, address):
    """Return a function that opens the page; then check that it made no errors and no other requests."""
    contexts, errors, requests = [], [], []

    def open_page(width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert set(requests) == {address}


def test_charts_tables_and_buttons_have_accessible_names(opened):
    page = opened()
    charts = page.locator("figure [role=img]").all()
    assert len(charts) > 15
    names = [chart.get_attribute("aria-label") for chart in page.get_by_role("img").all()]
    assert "AmnesiacHAT: free capacity" in names
    assert len(set(names)) == len(names)
    numbers = "e => document.getElementById(e.getAttribute('aria-details')).querySelector('ul').textContent"
    assert all(len(chart.evaluate(numbers).strip()) > 40 for chart in charts)
    page.locator("#summary > details").evaluate("part => { part.open = true; }")
    assert page.get_by_role("table", name="All strategies at the end of the stream").count() == 1
    for button in page.locator("button").all():
        assert button.get_attribute("aria-label") or button.text_content().strip()
    assert page.locator("table:not(:has(caption), .overview)").count() == 0
    assert page.get_by_role("table", name="AmnesiacHAT: test accuracy (%)").count() == 1
    assert page.locator("html[lang=en] title").count() > 0


def test_every_text_has_enough_contrast_and_the_page_never_scrolls_sideways(opened):
    page = opened()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
        contrast = page.evaluate(DIM_TEXT)
        assert contrast["found"] == []
        assert contrast["seen"] > 500
    page.set_viewport_size({"width": 320, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_tables_are_sorted_by_a_click_or_a_key_on_a_column(opened):
    page = opened()
    page.locator("#summary > details").evaluate("part => { part.open = true; }")
    table = page.locator("#summary-table")
    button = table.get_by_role("button", name="JSD (bit)")

    def column():
        return table.locator("tbody tr").evaluate_all("rows => rows.map(row => row.cells[0].textContent)")

    button.click()
    assert column() == ["AmnesiacHAT pools", "AmnesiacHAT", "EWC"]
    assert table.locator("th[aria-sort=ascending]").text_content().strip() == "JSD (bit)"
    button.click()
    assert column() == ["EWC", "AmnesiacHAT", "AmnesiacHAT pools"]
    capacity = table.get_by_role("button", name="free capacity")
    for _ in range(2):
        capacity.focus()
        page.keyboard.press("Enter")
        assert column()[-1] == "EWC"  # it has no capacity


def test_a_table_is_copied_as_csv_with_exact_numbers(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.locator("#transfer > details").evaluate("part => { part.open = true; }")
    copied = []
    for change in ("() => {}", "() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }"):
        page.evaluate(change)  # the second is like a browser without a clipboard for files
        page.evaluate("navigator.clipboard.write([])")
        page.get_by_role("button", name="Copy as CSV: Remaining tasks").click()
        page.get_by_text("Copied", exact=True).wait_for()
        copied.append(page.evaluate("navigator.clipboard.readText()"))
    assert copied[0] == copied[1]
    rows = list(csv.DictReader(io.StringIO(copied[0])))
    assert list(rows[0]) == ["strategy", "seed", "after task", "average forgetting", "backward transfer"]
    moments = {run.name: run.moments for run in runs_of_demo()}
    first_seed = [row for row in rows if row["seed"] == "0"]
    assert len(first_seed) == 15
    for row in first_seed:
        moment = moments[row["strategy"]][int(row["after task"])]
        assert float(row["average forgetting"]) == moment.number("Forgetting")
        assert float(row["backward transfer"]) == moment.number("BackwardTransfer")


def test_a_printed_page_shows_all_details_on_white_and_no_script_is_needed_to_read(opened):
    page = opened(width=718, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("button", name="Copy as CSV").first.is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 5
    page = opened(java_script_enabled=False)
    assert page.get_by_role("heading", name="What was forgotten, was it really").is_visible()
    assert page.get_by_role("img", name="AmnesiacHAT: free capacity").is_visible()
