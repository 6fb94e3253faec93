"""Names that were nearly written."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'relearn'?`` where a name that exists is near, else nothing: the end of an error's message."""
    near = difflib.get_close_matches(word, [*known], 1)
    return f"; did you mean {near[0]!r}?" if near else ""
