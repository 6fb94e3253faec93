"""Charts of the page: their numbers in the drawing and in words, the page's colours, nothing that asks for a file."""

import re
from importlib import resources
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from avalanche_amnesia.evaluation import distance_in_words
from avalanche_amnesia.evaluation.figures import COLOURS, ROLES, Cell, matrix_figure
from avalanche_amnesia.lab.report.charts import Axis, Chart, Series, line_chart
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import percent

SHARE = Axis("accuracy", percent, "{:.0%}".format, (0.0, 1.0))
BITS = Axis("JSD (bit)", distance_in_words, "{:g}".format)


def spread(value: float, apart: float = 0.0) -> Spread:
    return Spread(value, value - apart, value + apart, 1 + bool(apart))


def lines(apart: float = 0.0) -> Chart:
    series = [
        Series("here", "this $model$", [(1, spread(0.3, apart)), (2, spread(0.2, apart))]),
        Series("order", "floor: order", [(1, spread(0.1)), (2, spread(0.25))]),
        Series("seed", "floor: seed", [(2, spread(0.15))]),
    ]
    return line_chart("x", series, BITS, after=[3, 0, 2], requests=[1, 2])


def words_in(figure: Figure) -> list[str]:
    """Texts of a figure's legends."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_lines_stand_at_their_numbers_beside_the_limit_of_detection() -> None:
    chart = lines()
    (ax,) = chart.figure.axes
    here, order, seed, *requests = ax.lines
    assert (here.get_xdata().tolist(), here.get_ydata().tolist()) == ([1, 2], [0.3, 0.2])
    assert [line.get_color() for line in (here, order, seed)] == [COLOURS[role] for role in ("here", "order", "seed")]
    assert [line.get_xdata() for line in requests] == [[1, 1], [2, 2]]
    limits = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in ax.patches}
    assert limits == {1: 0.1, 2: 0.25}  # the higher floor, wherever one was measured
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] >= 0.3
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "0", "2"]
    names = {"this $model$", "floor: order", "floor: seed", "request", "up to the limit of detection"}
    assert set(words_in(chart.figure)) == names
    assert "this $model$, after task 0: 0.30" in chart.numbers
    assert "floor: seed, after task 2: 0.15" in chart.numbers
    assert len(chart.numbers) == 5


def test_bands_are_drawn_for_several_seeds_alone() -> None:
    assert not lines().figure.axes[0].collections
    (band,) = lines(apart=0.05).figure.axes[0].collections
    assert band.get_datalim(band.axes.transData).intervaly.tolist() == pytest.approx([0.15, 0.35])
    assert "this $model$, after task 0: 0.30 (0.25 to 0.35)" in lines(apart=0.05).numbers


def test_what_is_drawn_stands_on_a_page_with_others() -> None:
    one, other = (lines(apart=0.05).svg(key) for key in ("jsd-1", "jsd-2"))
    assert one == lines(apart=0.05).svg("jsd-1")
    ids = [set(re.findall(r'\bid="(.*?)"', drawn)) for drawn in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'href="(.*?)"', one)) <= {f"#{name}" for name in ids[0]}
    assert not re.search(r"url\(|https?:|<style|<\?xml|<!DOCTYPE", one)
    assert ">this $model$<" in one  # text as text, and no formula
    assert len(one) < 30_000


def test_names_in_any_letters_are_drawn_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    chart = lines()
    chart.figure.axes[0].set_xlabel("遗忘 <&> #0b5cad")
    assert "遗忘 &lt;&amp;&gt; #0b5cad" in chart.svg("x")
    assert not recwarn.list


def test_figures_of_many_tasks_stay_small() -> None:
    cells = [[Cell(0.5)] * 200] * 200
    large = matrix_figure({"": cells}, rows=range(200), columns=range(200), row_label="task", column_label="with task")
    assert len(Chart("x", (), large).svg("x")) < 300_000
    after = range(200)
    long = line_chart(
        "x", [Series("here", "x", [(n, spread(0.5, 0.1)) for n in after])], SHARE, after=after, requests=[]
    )
    assert len(long.svg("x")) < 100_000
    (ax,) = long.figure.axes
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_colours_are_those_of_the_page_in_light_and_dark() -> None:
    style = resources.files("avalanche_amnesia.lab.report").joinpath("templates/page.css").read_text()
    light, dark, paper = (dict(re.findall(r"--(\w+): (#\w{6});", part)) for part in style.split(":root {")[1:4])
    assert light == paper
    assert light.keys() == dark.keys()
    assert COLOURS.items() - {("page", COLOURS["page"])} <= light.items()
    drawn = lines(apart=0.05).svg("x")
    assert not any(colour in drawn for colour in COLOURS.values())
    assert {f"var(--{role})" for role in ("here", "order", "seed", "quiet", "bad")} <= set(
        re.findall(r"var\(.*?\)", drawn)
    )
    assert len({ROLES[role]["marker"] for role in ROLES}) == len(ROLES)  # colour is never the only difference
