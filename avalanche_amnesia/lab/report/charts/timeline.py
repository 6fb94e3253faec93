"""Tasks in the model over the stream, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from avalanche_amnesia.lab.report.charts.bars import Bar, Bars
from avalanche_amnesia.lab.report.charts.parts import WIDTH, Mark, Tick


def timeline(title: str, after: Sequence[int], gone: Mapping[int, int]) -> Bars:
    """Bars from the training of a task to its unlearning."""
    left, right = Bars.left, WIDTH - 8.0
    step = (right - left) / max(len(after), 1)
    texts, bars, crosses, told = [], [], [], []
    for n, task in enumerate(after):
        y = 6.0 + 26 * n
        start = left + step * n
        if task in gone:
            role, text, words = "gone", "unlearned", f"task {task}: trained, unlearned after task {gone[task]}"
            end = left + step * (after.index(gone[task]) + 1)
            crosses.append(Mark(round(end - 8, 1), y + 9, words))
        else:
            role, text, words, end = "here", "remains", f"task {task}: trained, remains", right
        room = end - start > 7 * len(text) + 20
        texts.append(Mark(0, y + 13, f"task {task}"))
        bars.append(Bar(round(start, 1), y, round(end - start, 1), role, text * room, words))
        told.append(words)
    bottom = 6.0 + 26 * len(after)
    return Bars(
        title=title,
        description=f"{'; '.join(told)}.",
        legend=[("here", "in the model until the end"), ("gone", "in the model, until unlearned at ✕")],
        height=bottom + 36,
        bottom=bottom,
        x_label="after the training of task",
        x_ticks=[Tick(round(left + step * (n + 1) - 8, 1), str(task)) for n, task in enumerate(after)],
        right=right,
        texts=texts,
        bars=bars,
        crosses=crosses,
    )
