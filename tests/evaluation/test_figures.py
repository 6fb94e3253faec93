"""Figures of metrics: their numbers, their names and the contrast of their text."""

import pytest
from matplotlib.colors import to_rgb

from avalanche_amnesia.contrib.metrics.mask_use import capacity_figure, overlap_figure
from avalanche_amnesia.evaluation.figures import Cell, as_png, matrix_figure

NAMES = {"row_label": "after", "column_label": "tested on"}


def luminance(colour: str | tuple[float, ...]) -> float:
    """Relative luminance, WCAG 2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_enough_contrast_on_every_shade() -> None:
    figure = matrix_figure({"": [[Cell(n / 100)] for n in range(101)]}, rows=range(101), columns=[0], **NAMES)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    (cells,) = ax.collections
    assert [text.get_text() for text in ax.texts] == [str(n) for n in range(101)]
    for text, fill in zip(ax.texts, cells.get_facecolors(), strict=True):
        dark, light = sorted((luminance(text.get_color()), luminance(tuple(fill[:3]))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_matrix_shows_its_numbers_words_and_frames() -> None:
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


def test_a_large_matrix_has_a_colour_scale_instead_of_numbers() -> None:
    figure = overlap_figure(range(300), [[n / 300] * 300 for n in range(300)])
    ax, _ = figure.axes
    assert not ax.texts
    assert max(figure.get_size_inches()) < 12


def test_a_matrix_without_tasks_is_drawn_and_missing_names_are_refused() -> None:
    assert overlap_figure([], []).texts[0].get_text() == "nothing to show"
    with pytest.raises(ValueError, match=r"2 names of rows and 1 of columns for a matrix '' of 1 rows"):
        matrix_figure({"": [[Cell(1.0)]]}, rows=[0, 1], columns=[0], **NAMES)


def test_the_figure_of_capacity_names_events_and_marks_requests() -> None:
    figure = capacity_figure(["task 0", "task 2", "unlearned 0"], [0.9, 0.5, 0.75], [1024, 3072, 2048], [0, 0, 1])
    above, below = figure.axes
    capacity, request = above.lines
    assert capacity.get_ydata().tolist() == [0.9, 0.5, 0.75]
    assert request.get_xdata() == [2, 2]
    assert below.lines[0].get_ydata().tolist() == [1, 3, 2]
    assert [label.get_text() for label in below.get_xticklabels()] == ["task 0", "task 2", "unlearned 0"]


def test_figures_of_equal_data_are_equal_bytes() -> None:
    one, other = (as_png(overlap_figure([0, 1], [[1, 0.25], [0.25, 1]])) for _ in range(2))
    assert one == other
