"""Read the log lines of a run logged as JSON lines."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from avalanche_amnesia.saving.values import has_type

RUN_FILE = "run.jsonl"
FORMAT = "avalanche-amnesia run"
VERSION = 1
_RECORD = re.compile(r"records/\d+\.json")
_LINES: dict[str, dict[str, Any]] = {
    "run": {"id": str, "name": str | None, "config": dict[str, Any] | None},
    "settings": {"settings": dict[str, Any], "name": str | None},
    "row": {"values": dict[str, float | int | dict[str, Any] | None]},
}
"""Kind of a line → types of its values."""


class JSONRunError(ValueError):
    """Error for a folder without a readable JSON run, or a folder where a run cannot be written."""


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a run's log as dicts; the first line describes the run."""
    file = folder / RUN_FILE
    if not file.is_file():
        raise JSONRunError(f"{folder} holds no {RUN_FILE}: give the folder of a JSONLogger")
    *whole, _cut = file.read_bytes().split(b"\n")
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
            kind = line["kind"]
            if number == 1 and (kind, line.get("format"), line.get("version")) != ("run", FORMAT, VERSION):
                raise ValueError(f"it does not begin like a run of version {VERSION} of JSONLogger")
            for name, of in _LINES.get(kind, {}).items():
                if not has_type(line[name], of):
                    raise ValueError(f"{name} is {line[name]!r:.80}")
            if kind == "record" and not _RECORD.fullmatch(line["path"]):  # the log may be untrusted
                raise ValueError(f"{line['path']!r} is no place of a record")
        except (ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise JSONRunError(f"line {number} of {file} is broken: {why}") from error
        yield line
    if not whole:
        raise JSONRunError(f"{file} has no whole line: give the folder of a JSONLogger")
