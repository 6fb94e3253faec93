"""Formatting of tables as text."""

from collections.abc import Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, with a header row ``head`` and rows of cells, as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["─" * width for width in widths])
    return "\n".join(f"│ {' │ '.join(line)} │" for line in lines)
