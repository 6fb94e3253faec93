"""Charts of the page: matplotlib figures in the page's colours, and all of their numbers in words."""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from avalanche_amnesia.contrib.metrics.pictures import REQUEST, ROLES
from avalanche_amnesia.evaluation.figures import COLOURS, SMALL, house_style, name_ticks, new_figure
from avalanche_amnesia.lab.report.reading import Spread
from avalanche_amnesia.lab.report.wording import over_seeds

_OUTLINE = {"facecolor": "none", "edgecolor": COLOURS["quiet"], "linestyle": (0, (3, 2))}
_TASK_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7")  # Okabe and Ito's
_PARTS: dict[str, dict[str, Any]] = {
    "here": {"facecolor": COLOURS["here"]},
    "gone": _OUTLINE,
    "free": _OUTLINE,
    "shared": {"facecolor": "#5b6470", "edgecolor": COLOURS["page"]},
    **{f"task{n}": {"facecolor": colour, "edgecolor": COLOURS["page"]} for n, colour in enumerate(_TASK_COLOURS)},
}
_ON_PARTS = {"task0": "#ffffff", "shared": "#ffffff", "free": COLOURS["ink"]}


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
    points: Sequence[tuple[float, Spread]]


@house_style
def timeline(title: str, after: Sequence[int], gone: Mapping[int, int]) -> Chart:
    """Bars from the training of a task to its unlearning."""
    figure = new_figure(26 * len(after) + 84)
    ax = figure.subplots()
    numbers = []
    for n, task in enumerate(after):
        end = after.index(gone[task]) + 1 if task in gone else len(after)
        ax.barh(n, end - n, left=n, height=0.7, **_PARTS["gone" if task in gone else "here"])
        if task in gone:
            ax.plot(end - 0.14, n, marker="x", markeredgewidth=2.5, color=COLOURS["bad"])
        numbers.append(f"task {task}: trained, {f'unlearned after task {gone[task]}' if task in gone else 'remains'}")
    ax.set(xlim=(0, len(after)), ylim=(len(after) - 0.5, -0.5), xlabel="after the training of task")
    name_ticks(ax.xaxis, after, first=1)
    name_ticks(ax.yaxis, [f"task {task}" for task in after], most=len(after))
    _legend_of_parts(figure, {"in the model until the end": "here", "in the model, until unlearned at ✕": "gone"}, 1)
    return Chart(title, numbers, figure)


@house_style
def owner_bars(
    title: str,
    layers: Mapping[str, Mapping[str, Mapping[str, float]]],
    words: Callable[[float], str],
    roles: Mapping[str, str],
) -> Chart:
    """Shares of every layer by owner, a bar for each moment."""
    rows = sum(1 + len(moments) for moments in layers.values())
    figure = new_figure(22 * rows + 48 + 18 * math.ceil(len(roles) / 4))
    ax = figure.subplots()
    numbers, ticks, y = [], {}, 0
    for layer, moments in layers.items():
        ax.text(0, y + 0.1, layer, va="center")
        for moment, owners in moments.items():
            y, start = y + 1, 0.0
            ticks[y] = moment
            for owner, share in owners.items():
                bar = ax.barh(y, share, left=start, height=0.8, **_PARTS[roles[owner]])
                name = owner.removeprefix("task ")
                if share * 290 > 6 * len(name) + 4:  # points
                    ink = _ON_PARTS.get(roles[owner], "#000000")
                    ax.bar_label(bar, [name], label_type="center", fontsize=SMALL, color=ink)
                start += share
            numbers.append(f"{layer}, {moment}: {', '.join(f'{o} {words(s)}' for o, s in owners.items())}")
        y += 1
    ax.set(xlim=(0, 1), ylim=(y - 0.5, -0.5), xlabel="share of the layer")
    ax.set_xticks((0, 0.5, 1), ("0%", "50%", "100%"))
    ax.set_yticks(list(ticks), list(ticks.values()))
    _legend_of_parts(figure, roles, 4)
    return Chart(title, numbers, figure)


def _legend_of_parts(figure: Figure, roles: Mapping[str, str], columns: int) -> None:
    handles = [Rectangle((0, 0), 1, 1, **_PARTS[role]) for role in roles.values()]
    figure.legend(handles, roles, loc="outside lower left", ncols=columns)


def draw_dots(ax: Axes, rows: Sequence[Mapping[str, Spread]], names: Mapping[str, str]) -> None:
    """Marks on tracks, a row each from the top, by role; of ours, on top, also the reach over the seeds."""
    for role, name in names.items():
        there = [(y, marks[role]) for y, marks in enumerate(rows) if role in marks]
        if not there:
            continue
        places, values = zip(*there, strict=True)
        look = ROLES[role] | {"linestyle": "", "zorder": 3 if role == "here" else 2, "clip_on": False}
        ax.plot([value.mean for value in values], places, label=name, **look)
        if role == "here":
            reach: dict[str, Any] = {"color": COLOURS["here"], "linewidth": 5, "alpha": 0.35}
            ax.hlines(places, [value.low for value in values], [value.high for value in values], **reach)
    ax.hlines(range(len(rows)), 0, 1, transform=ax.get_yaxis_transform(), color=COLOURS["rule"], linewidth=1, zorder=1)


@house_style
def dot_chart(
    title: str, rows: Sequence[tuple[str, Mapping[str, Spread]]], names: Mapping[str, str], axis: Axis
) -> Chart:
    """Marks on one scale, a row each; logarithmic where the axis has no ends."""
    marked = [marks for _, marks in rows]
    figure = new_figure(40 * len(rows) + 40 + 18 * len({role for marks in marked for role in marks}))
    ax = figure.subplots()
    draw_dots(ax, marked, names)
    for y, (text, _) in enumerate(rows):
        ax.text(0, y - 0.35, text, transform=ax.get_yaxis_transform(), va="center")
    ticks = _round_numbers(*axis.ends) if axis.ends else _powers(marked)
    ax.set(xscale="linear" if axis.ends else "log", xlabel=axis.label, ylim=(len(rows) - 0.6, -0.7), yticks=())
    ax.set_xticks(ticks, map(axis.tick_words, ticks))
    ax.set_xticks((), minor=True)
    ax.set_xlim(ticks[0], ticks[-1])
    ax.grid(axis="x")
    figure.legend(loc="outside lower left")
    numbers = [
        f"{text}: {', '.join(f'{names[role]} {over_seeds(value, axis.words)}' for role, value in marks.items())}"
        for text, marks in rows
    ]
    return Chart(title, numbers, figure)


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
        limit: dict[str, Any] = {
            "width": 1,
            "color": COLOURS["quiet"],
            "alpha": 0.13,
            "label": "up to the limit of detection",
        }
        ax.bar(list(floors), list(floors.values()), **limit)
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
        f"{each.name}, after task {after[round(place)]}: {over_seeds(value, axis.words)}"
        for each in series
        for place, value in each.points
    ]
    return Chart(title, numbers, figure)


def _round_numbers(low: float, high: float) -> Sequence[float]:
    """Round numbers at equal distances that enclose a range."""
    ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high if high > low else low + 1.0)
    return [round(float(tick), 12) for tick in ticks]


def _powers(rows: Sequence[Mapping[str, Spread]]) -> Sequence[float]:
    """Powers of ten that enclose all numbers."""
    ends = [math.log10(end) for marks in rows for value in marks.values() for end in (value.low, value.high)]
    first = math.floor(min(ends))
    return [10.0**power for power in range(first, max(math.ceil(max(ends)), first + 1) + 1)]
