"""Charts of the page: matplotlib figures in the page's colours, and all of their numbers in words."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from avalanche_amnesia.evaluation.figures import COLOURS, REQUEST, ROLES, house_style, name_ticks, new_figure
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds


@dataclass(frozen=True)
class Chart:
    """A figure, what it shows, and all of its numbers in words."""

    title: str
    numbers: Sequence[str]
    figure: Figure

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in points."""
        width, height = 72 * self.figure.get_size_inches()
        return round(width, 1), round(height, 1)

    @house_style
    def svg(self, key: str) -> Markup:
        """Content of an SVG element that stands with others in a page: no id twice, colours under the page's names."""
        file = io.StringIO()
        dots_per_inch = self.figure.dpi
        self.figure.set(facecolor="none", dpi=144)
        text_as_text = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key})
        with text_as_text, warnings.catch_warnings(action="ignore"):  # of letters that only other fonts have
            FigureCanvasSVG(self.figure).print_svg(file, metadata={"Date": None})  # ``savefig`` draws all of it twice
        self.figure.set_dpi(dots_per_inch)  # the canvas leaves its own
        drawn = file.getvalue()
        drawn = drawn[drawn.index("</metadata>") + len("</metadata>") : drawn.rindex("</svg>")]
        for unwanted, kept in _ONLY_IN_FILES.items():
            drawn = re.sub(unwanted, kept, drawn, flags=re.DOTALL)
        return Markup(re.sub("(?<=fill: |roke: )#[0-9a-f]{6}", lambda c: _ON_PAGE.get(c[0], c[0]), drawn))


_ON_PAGE = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_ONLY_IN_FILES = {
    r"<style.*?</style>": "",  # it would be for the whole page
    r'<g id="[^"]*"': "<g",
    r"<clipPath.*?</clipPath>": "",
    r' clip-path="[^"]*"': "",
    r"font-family: [^;]*; ": "",
    r' transform="rotate\(-0 [^"]*"': "",
    r"\s*\n\s*": " ",
}


@dataclass(frozen=True)
class Axis:
    """An axis of numbers."""

    label: str
    words: Callable[[float], str]
    tick_words: Callable[[float], str]
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Numbers of one role over the stream, as (place, number)."""

    role: str
    name: str
    points: Sequence[tuple[int, Spread]]


@house_style
def line_chart(
    title: str, series: Sequence[Series], axis: Axis, *, after: Sequence[int], requests: Sequence[int]
) -> Chart:
    """Lines over the stream, with a band over the seeds and a grey area up to the higher floor."""
    floors: dict[float, float] = {}
    figure = new_figure(200 + 18 * len(series))
    ax = figure.subplots()
    for each in series:
        places, values = zip(*each.points, strict=True)
        top = 3 if each.role == "here" else 2
        ax.plot(places, [value.mean for value in values], label=each.name, zorder=top, **ROLES[each.role])
        low, high = [value.low for value in values], [value.high for value in values]
        if low != high:
            ax.fill_between(places, low, high, color=ROLES[each.role]["color"], alpha=0.18, linewidth=0)
        if each.role in ("order", "seed"):
            floors |= {place: max(value.mean, floors.get(place, 0.0)) for place, value in each.points}
    if floors:
        limit: dict[str, Any] = {"width": 1, "color": COLOURS["quiet"], "alpha": 0.13}
        ax.bar(list(floors), list(floors.values()), label="up to the limit of detection", **limit)
    for n, place in enumerate(requests):
        ax.axvline(place, label=None if n else "request", **REQUEST)
    reach = [end for each in series for _, value in each.points for end in (value.low, value.high)]
    ticks = _round_numbers(*(axis.ends or (min(0.0, *reach), max(0.0, *reach))))
    ax.set(xlabel="after task", ylabel=axis.label, xlim=(-0.5, len(after) - 0.5), ylim=(ticks[0], ticks[-1]))
    name_ticks(ax.xaxis, after)
    ax.set_yticks(ticks, map(axis.tick_words, ticks))
    ax.grid(axis="y")
    figure.legend(loc="outside lower left")
    numbers = [
        f"{each.name}, after task {after[place]}: {over_seeds(value, axis.words)}"
        for each in series
        for place, value in each.points
    ]
    return Chart(title, numbers, figure)


def _round_numbers(low: float, high: float) -> Sequence[float]:
    """Round numbers at equal distances that enclose a range."""
    ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high if high > low else low + 1.0)
    return [round(float(tick), 12) for tick in ticks]
