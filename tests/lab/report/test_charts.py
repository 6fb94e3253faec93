"""Charts of the page: places, words and colours of their numbers."""

import re
from importlib import resources
from typing import Any

import pytest

from avalanche_amnesia.evaluation.figures import COLOURS, ROLES
from avalanche_amnesia.evaluation.resolution import distance_in_words
from avalanche_amnesia.lab.report.charts import Axis, LineChart, Matrix, Series, legend_of, scale_of
from avalanche_amnesia.lab.report.page import _environment
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import percent

SHARE = Axis("accuracy", percent, "{:.0%}".format, (0.0, 1.0))
BITS = Axis("JSD (bit)", distance_in_words, "{:g}".format, is_logarithmic=True)


def spread(value: float, apart: float = 0.0) -> Spread:
    return Spread(value, value - apart, value + apart, 1 + bool(apart))


def drawn(macro: str, chart: LineChart | Matrix, *more: Any) -> str:
    """Return the HTML of a chart."""
    return str(getattr(_environment().get_template("charts.jinja").module, macro)(chart, *more))


def lines(apart: float = 0.0) -> LineChart:
    series = [
        Series("here", "this <model>", [(1, spread(0.3, apart)), (2, spread(0.2, apart))]),
        Series("order", "floor: order", [(1, spread(0.1)), (2, spread(0.25))]),
    ]
    scale = [(0.0, "0"), (100.0, "1")], lambda value: 100 * value
    return LineChart("EWC", "JSD", series, SHARE, scale, [3, 0, 2, 4], [1, 2])


def test_lines_are_drawn_at_their_numbers_and_listed_in_words() -> None:
    chart = lines()
    assert [chart.x(place) for place in range(4)] == [12.5, 37.5, 62.5, 87.5]
    assert [chart.y(value) for value in (0.0, 0.3, 1.0)] == [100, 70, 0]
    told = drawn("lines", chart, "jsd-1")
    assert '<polyline class="line here" points="37.5,70.0 62.5,80.0"/>' in told
    assert '<use href="#mark-here" x="37.5%" y="70.0%"/>' in told
    assert re.findall(r'class="request" x1="(.*?)%"', told) == ["37.5", "62.5"]
    assert re.findall(r'left:(.*?)%">(\d)<', told) == [("12.5", "3"), ("37.5", "0"), ("62.5", "2"), ("87.5", "4")]
    assert "band" not in told
    assert "<li>this &lt;model&gt;, after task 0: 30.0\xa0%</li>" in told
    assert chart.numbers[-1] == "floor: order, after task 2: 25.0\xa0%"
    assert legend_of([chart]) == {"here": "this <model>", "order": "floor: order"}


def test_a_scale_contains_all_numbers_and_starts_at_0() -> None:
    ticks, place = scale_of(Axis("points", percent, "{:g}".format), lines(apart=0.05).series)
    assert ticks[0] == (0, "0")
    assert ticks[-1][0] == 100
    assert 0 < place(0.35) <= 100
    assert [words for _, words in scale_of(SHARE, [])[0]] == ["0%", "25%", "50%", "75%", "100%"]


def test_numbers_below_detection_are_drawn_below_all_decades() -> None:
    series = [Series("here", "x", [(0, spread(0.0)), (1, spread(3e-4)), (2, spread(1e-17))])]
    ticks, place = scale_of(BITS, [*series, Series("order", "y", [(0, spread(0.02))])])
    assert [words for _, words in ticks] == ["below", "0.0001", "0.001", "0.01", "0.1"]
    assert [at for at, _ in ticks] == [0, 25, 50, 75, 100]
    assert (place(0.0), place(1e-17), place(1e-3)) == (0, 0, pytest.approx(50))
    assert scale_of(BITS, [])[0][0] == (0, "below")


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
    assert marks.keys() == ROLES.keys()
    assert len(shapes) == len(marks)
    with pytest.raises(ValueError, match="names do not fit"):
        Matrix("x", "y", [0], [0, 1], [[None]], "")
