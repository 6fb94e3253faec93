"""The report in a real browser: no error, no request, names, contrast in both schemes, phone, paper, sorting, CSV."""

import csv
import io
import shutil

import pytest
from playwright.sync_api import sync_playwright
from support.report_results import another_seed, content, runs_of

from avalanche_amnesia.lab.report import report_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install the package chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

DIM_TEXT = """() => {
  // Every text whose contrast to what lies behind it is below WCAG's 4.5 : 1.
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
    file.write_text(report_page([*runs_of(content(), timings=True), *another_seed(1)]))
    return file.as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, address):
    """A function that opens the page; afterwards there was no error, and nothing but the file was asked for."""
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


def test_charts_tables_and_buttons_have_names(opened):
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_lies_behind_it(opened, scheme):
    page = opened(color_scheme=scheme)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    contrast = page.evaluate(DIM_TEXT)
    assert contrast["found"] == []
    assert contrast["seen"] > 500


@pytest.mark.parametrize("width", [320, 390, 800])
def test_the_page_never_scrolls_sideways(opened, width):
    page = opened(width)
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1280])
def test_text_in_charts_stays_within_them(opened, width):
    seen = opened(width).evaluate("""() => [...document.querySelectorAll("figure")].map((figure) => {
      const frame = figure.getBoundingClientRect();
      const texts = [...figure.querySelectorAll(".plot span, .matrix small")];
      const own = (text) => text.closest("td")?.getBoundingClientRect() ?? frame;
      return [texts.length, texts.filter((text) => {
        const box = text.getBoundingClientRect(), around = own(text);
        return box.left < around.left - 1 || box.right > around.right + 1 || box.bottom > around.bottom + 1;
      }).map((text) => text.textContent)];
    })""")
    assert [outside for _, outside in seen if outside] == []
    assert sum(n for n, _ in seen) > 200


def test_no_text_in_charts_lies_on_another(opened):
    overlapping = opened().evaluate("""() => [...document.querySelectorAll("figure [role=img]")].flatMap((svg) => {
      const boxes = [...svg.querySelectorAll("span")].map((text) => [text.textContent, text.getBoundingClientRect()]);
      return boxes.flatMap(([words, a], n) => boxes.slice(n + 1).filter(([, b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4  // boxes are a line high, letters less
      ).map(([other]) => [svg.getAttribute("aria-label"), words, other]));
    })""")
    assert overlapping == []


@pytest.mark.parametrize("strategies", [1, 2, 3])
def test_charts_fill_their_rows_whatever_the_number_of_strategies(opened, strategies):
    page = opened()
    left = page.evaluate(
        """(n) => [...document.querySelectorAll(".charts")].map((row) => {
      [...row.children].slice(n).forEach((figure) => figure.remove());
      return row.getBoundingClientRect().right - row.lastElementChild.getBoundingClientRect().right;
    })""",
        strategies,
    )
    assert len(left) > 6
    assert max(left) < 2


def test_the_first_screen_has_every_strategy_with_its_verdict(opened):
    page = opened()
    page.set_viewport_size({"width": 1280, "height": 800})
    rows = page.locator(".overview tbody tr")
    names = [rows.nth(n).locator("th").inner_text() for n in range(rows.count())]
    assert names == ["AmnesiacHAT", "AmnesiacHAT pools", "EWC"]
    assert "exact" in rows.nth(1).inner_text()
    assert rows.nth(2).bounding_box()["y"] + rows.nth(2).bounding_box()["height"] < 800
    assert page.get_by_role("img", name="AmnesiacHAT: old head 59").is_visible()


def test_tables_are_sorted_by_a_click_on_a_column(opened):
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
    capacity.click()
    assert column()[-1] == "EWC"  # it has none
    capacity.click()
    assert column()[-1] == "EWC"
    capacity.focus()
    page.keyboard.press("Enter")
    assert table.locator("th[aria-sort=ascending]").text_content().strip() == "free capacity"


@pytest.mark.parametrize("allowed", [True, False])
def test_a_table_is_copied_as_csv_with_its_numbers_in_full(opened, allowed):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    if not allowed:  # as for a file in a browser that gives it no clipboard
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    page.locator("#difference > details").evaluate("part => { part.open = true; }")
    page.get_by_role("button", name="Copy as CSV: Accuracy difference").click()
    page.get_by_text("Copied", exact=True).wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    rows = list(csv.DictReader(io.StringIO(copied)))
    assert list(rows[0]) == ["strategy", "seed", "after task", "AD", "AD, control"]
    results = content()
    first_seed = [row for row in rows if row["seed"] == "0"]
    assert len(first_seed) == 15
    for row in first_seed:
        event = results["strategies"][row["strategy"]]["events"][int(row["after task"])]
        assert float(row["AD"]) == event["accuracy_difference"]
        assert float(row["AD, control"]) == event["accuracy_difference_control"]


def test_paper_shows_everything_in_dark_ink(opened):
    page = opened(width=718, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_role("button", name="Copy as CSV").first.is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("#accuracy-table-1").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 5


def test_without_scripts_everything_can_be_read(opened):
    page = opened(java_script_enabled=False)
    assert page.get_by_role("heading", name="What was forgotten, was it really").is_visible()
    assert page.get_by_role("img", name="AmnesiacHAT: free capacity").is_visible()
