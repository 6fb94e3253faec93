"""The index of a pack: a sealed JSON text that says what the pack's blobs are, checked against its schema."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from avalanche_amnesia.saving.files import Check, Sign, sealed, unsealed
from avalanche_amnesia.saving.values import StateError

INDEX, BLOBS = "index.json", "blobs"
HEAD = {"format": "avalanche-amnesia pack", "version": 1}
SCHEMA = Path(__file__).with_name("index.schema.json")


def index_text(content: Mapping[str, Any], sign: Sign | None = None) -> str:
    """Text of an index, signed where ``sign`` is given."""
    signature = {} if sign is None else {"signature": sign(content)}
    text = sealed(content, **HEAD, **signature)
    _check(json.loads(text))
    return text


def read_index(text: str, check: Check | None = None) -> dict[str, Any]:
    """Content of an index; an error unless it is one to the letter, and names no blob that it does not list."""
    content = unsealed(text, check, **HEAD)
    _check(json.loads(text))
    missing = {blob for run in content["runs"] for blob in blobs_of(run)} - content["blobs"].keys()
    if missing:
        raise StateError(f"its runs name blobs that it does not list: {min(missing)}")
    return content


def blobs_of(run: Mapping[str, Any]) -> list[str]:
    """Blobs that the entry of a run names."""
    states = [run["end"], *([run["before"]] if "before" in run else []), *(each["model"] for each in run["references"])]
    return [blob for files in (run["files"], *states) for blob in files.values()]


def _check(document: Any) -> None:
    error = jsonschema.exceptions.best_match(_validator().iter_errors(document))
    if error is not None:
        raise StateError(f"it does not fit the schema of a pack at {error.json_path}: {error.message:.300}")


@cache
def _validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
