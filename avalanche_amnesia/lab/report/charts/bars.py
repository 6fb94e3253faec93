"""Bars from left to right, and the shares of layers as such bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from avalanche_amnesia.lab.report.charts.parts import WIDTH, Chart, Mark, Tick, places


@dataclass(frozen=True)
class Bar:
    """A part of a bar, with words in it where there is room."""

    x: float
    y: float
    width: float
    role: str
    text: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Bars from left to right: parts of a whole, or spans of time."""

    kind: ClassVar[str] = "bars"
    left: ClassVar[float] = 52.0
    bar_height: ClassVar[float] = 18
    right: float
    texts: Sequence[Mark]
    bars: Sequence[Bar]
    crosses: Sequence[Mark] = ()


def owner_bars(
    title: str,
    layers: Mapping[str, Mapping[str, Mapping[str, float]]],
    words: Callable[[float], str],
    roles: Mapping[str, str],
) -> Bars:
    """Shares of every layer by owner, a bar for each moment."""
    left, right = Bars.left, WIDTH - 18.0
    texts, bars, told, y = [], [], [], 6.0
    for layer, moments in layers.items():
        texts.append(Mark(0, y + 12, layer))
        y += 18
        for moment, owners in moments.items():
            texts.append(Mark(0, y + 13, moment))
            x = left
            for owner, share in owners.items():
                width = share * (right - left)
                fitting = [name for name in (owner, owner.removeprefix("task ")) if width > 6.5 * len(name) + 8]
                text = fitting[0] if fitting else ""
                tip = f"{layer}, {moment}, {owner}: {words(share)}"
                bars.append(Bar(round(x, 1), y, round(width, 1), roles[owner], text, tip))
                x += width
            told.append(f"{layer} {moment}: {', '.join(f'{o} {words(s)}' for o, s in owners.items())}.")
            y += 22
        y += 6
    at = places((0, 1), (left, right))
    return Bars(
        title=title,
        description=" ".join(told),
        legend=[(role, owner) for owner, role in roles.items()],
        height=y + 34,
        bottom=y,
        x_label="share of the layer",
        x_ticks=[Tick(at(part), f"{part:.0%}") for part in (0, 0.5, 1)],
        right=right,
        texts=texts,
        bars=bars,
    )
