"""Figures of metrics: every number stands where it belongs and can be read, whatever the number of tasks."""

from itertools import pairwise

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from avalanche_amnesia.contrib.metrics.mask_use import capacity_figure, overlap_figure
from avalanche_amnesia.evaluation.figures import Cell, as_png, matrix_figure

NAMES = {"row_label": "after", "column_label": "tested on"}


def luminance(colour: str | tuple[float, ...]) -> float:
    """Relative luminance, WCAG 2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def drawn(figure: Figure) -> Figure:
    figure.draw_without_rendering()
    return figure


def test_text_on_every_shade_can_be_read() -> None:
    figure = drawn(matrix_figure({"": [[Cell(n / 100)] for n in range(101)]}, rows=range(101), columns=[0], **NAMES))
    (ax,) = figure.axes
    (cells,) = ax.collections
    assert [text.get_text() for text in ax.texts] == [str(n) for n in range(101)]
    for text, fill in zip(ax.texts, cells.get_facecolors(), strict=True):
        dark, light = sorted((luminance(text.get_color()), luminance(tuple(fill[:3]))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_matrix_shows_its_numbers_its_words_and_its_frames() -> None:
    cells = [[Cell(1.0), None], [Cell(0.493, ("chance 50",), framed=True), Cell(0.9)]]
    figure = matrix_figure({"here": cells, "there": cells}, rows=["task 3", "task 0"], columns=[3, 0], **NAMES)
    for ax, title in zip(figure.axes, ("here", "there"), strict=True):
        assert ax.get_title() == title
        shown = {text.get_text(): (text.xy, text.get_color()) for text in ax.texts}
        assert {words: place for words, (place, _) in shown.items()} == {
            "100": (0.5, 0.5),
            "49": (0.5, 1.5),
            "chance 50": (0.5, 1.5),
            "90": (1.5, 1.5),
        }
        assert {frame.get_bbox().min.round().tolist() == [0, 1] for frame in ax.patches} == {True}
        assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "0"]
        assert ax.get_ylim() == (2, 0)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["task 3", "task 0"]


def test_words_stay_within_their_cells() -> None:
    cells = [[Cell(0.5, ("chance 100",), framed=True)] * 12] * 2
    (ax,) = drawn(matrix_figure({"": cells}, rows=range(2), columns=range(12), **NAMES)).axes
    frame = ax.patches[0].get_window_extent()
    for words in ax.texts[:2]:
        box = words.get_window_extent()
        assert frame.x0 < box.x0 < box.x1 < frame.x1
        assert frame.y0 < box.y0 < box.y1 < frame.y1


def test_a_large_matrix_has_a_scale_in_place_of_numbers_and_names_apart_from_each_other() -> None:
    figure = drawn(overlap_figure(range(300), [[n / 300] * 300 for n in range(300)]))
    ax, scale = figure.axes
    assert not ax.texts
    assert [label.get_text() for label in scale.get_yticklabels()][-1] == "100%"
    for axis in (ax.xaxis, ax.yaxis):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert max(figure.get_size_inches()) < 12
    assert len(as_png(figure)) < 300_000


def test_a_long_stream_has_names_apart_from_each_other() -> None:
    names = [f"unlearned {n}, {n + 1}, {n + 2}" for n in range(400)]
    figure = drawn(capacity_figure(names, [0.5] * 400, [1024] * 400, [False] * 400))
    places = [label.get_window_extent().x1 for label in figure.axes[1].get_xticklabels()]
    assert min(b - a for a, b in pairwise(places)) > 10
    assert max(figure.get_size_inches()) <= 20


def test_no_task_is_no_error_and_missing_names_are() -> None:
    assert drawn(overlap_figure([], [])).texts[0].get_text() == "nothing to show"
    with pytest.raises(ValueError, match=r"2 names of rows and 1 of columns for a matrix '' of 1 rows"):
        matrix_figure({"": [[Cell(1.0)]]}, rows=[0, 1], columns=[0], **NAMES)


def test_capacity_has_the_events_names_and_marks_requests() -> None:
    figure = capacity_figure(["task 0", "task 2", "unlearned 0"], [0.9, 0.5, 0.75], [1024, 3072, 2048], [0, 0, 1])
    above, below = figure.axes
    capacity, request = above.lines
    assert capacity.get_ydata().tolist() == [0.9, 0.5, 0.75]
    assert request.get_xdata() == [2, 2]
    assert below.lines[0].get_ydata().tolist() == [1, 3, 2]
    assert [label.get_text() for label in below.get_xticklabels()] == ["task 0", "task 2", "unlearned 0"]


def test_the_same_data_give_the_same_bytes() -> None:
    one, other = (as_png(overlap_figure([0, 1], [[1, 0.25], [0.25, 1]])) for _ in range(2))
    assert one == other
