"""Logger that writes a run as JSON lines without a second process; `amnesia sync` sends such runs to W&B.

A run is a folder with `run.jsonl`, `media/` (PNG) and `records/` (JSON). Each line of `run.jsonl` is a JSON object with
a `kind`. Lines are appended whole and flushed, so a killed run keeps its log. At most the last line is incomplete;
readers ignore it.
"""

import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.lab.logging.run_lines import FORMAT, RUN_FILE, VERSION, JSONRunError, lines_of
from avalanche_amnesia.logging.payloads import Payload
from avalanche_amnesia.logging.run_logger import DEFAULT_PROJECT, RunLogger
from avalanche_amnesia.saving.files import explain_errors, replace_file

_FILES = {"media": "png", "records": "json"}
"""Folder for files of a run → extension of these files."""


class JSONWriter:
    """Writer that appends a run's values to the log in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = (folder / RUN_FILE).open("a", encoding="utf-8")
        self._n = dict.fromkeys(_FILES, 0)

    def describe(self, settings: Mapping[str, Any], name: str | None) -> None:
        """Append a line to the log with a strategy's settings, and with a name for the run if it has none."""
        self._append("settings", settings=settings, name=name)

    def define(self, metric: str, axis: str) -> None:
        """Log which x axis a metric is drawn over, as ``wandb.define_metric`` does."""
        self._append("metric", metric=metric, axis=axis)

    def log(self, row: Mapping[str, Payload]) -> None:
        """Append a row of values to the log, after saving the row's pictures to files."""
        self._append("row", time=round(time.time(), 3), values={name: self._as_json(v) for name, v in row.items()})

    def note(self, texts: Mapping[str, str]) -> None:
        """Append a line of texts, such as unlearning summaries, to the log."""
        self._append("texts", texts=dict(texts))

    def keep(self, record: UnlearningRecord, *, again: bool = False) -> None:
        """Save an unlearning's record to a new file and log its path; if ``again``, replace the last record's file."""
        if again:
            record.save(self.folder / f"records/{self._n['records']}.json")
        else:
            self._append("record", path=self._save("records", record))

    def forget(self, tasks: tuple[int, ...]) -> None:
        """Append a line to the log that removes earlier values of ``tasks`` from the run's summary."""
        self._append("forget", tasks=list(tasks))

    def finish(self, exit_code: int) -> None:
        """Append the last line with the exit code to the log, and close the log."""
        self._append("end", exit_code=exit_code)
        self._file.close()

    def _append(self, kind: str, **content: Any) -> None:
        line = json.dumps({"kind": kind, **content}) + "\n"
        with explain_errors(self.folder):  # on a full disk the line stays in the file's buffer
            self._file.write(line)
            self._file.flush()

    def _save(self, kind: str, content: Image.Image | UnlearningRecord) -> str:
        """Save a picture or record to a new file, and return the file's path in the run's folder."""
        self._n[kind] += 1
        path = f"{kind}/{self._n[kind]}.{_FILES[kind]}"
        (self.folder / kind).mkdir(exist_ok=True)
        content.save(self.folder / path)
        return path

    def _as_json(self, value: Payload) -> Any:
        if isinstance(value, Image.Image):
            path = self._save("media", value)
            return {"_type": "image", "path": path, "width": value.width, "height": value.height}
        if isinstance(value, Table):
            return {"_type": "table", "columns": list(value.columns), "data": [list(row) for row in value.rows]}
        if isinstance(value, float) and not math.isfinite(value):
            return {"_type": "number", "value": str(value)}  # JSON has no such number
        return value


class JSONLogger(RunLogger):
    """Logger that writes the values of :class:`RunLogger` to a folder: JSON lines, pictures as PNG, records as JSON.

    It needs no second process, which suits many short runs: log to JSON first, and send selected folders to W&B with
    `amnesia sync`. A pickled logger does not contain its run, and a loaded one takes no values.

    Args:
        folder: folder of this run, new or empty; created if missing.
        project: W&B project for the run.
        name: name of the run; None: method and seed of the strategy.
        group: group of the run, e.g. one experiment with several seeds.
        job_type: role of the run in its group: "main", "reference", "full", "audit", or another word.
        config: settings to log in addition to those of the strategy.
        pictures: if True, draw and log this package's pictures; their tables are always logged.

    Raises:
        JSONRunError: the folder is a file or is not empty.
        TypeError: `config` contains a value that JSON cannot represent.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str = DEFAULT_PROJECT,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        config: Mapping[str, Any] | None = None,
        pictures: bool = True,
    ) -> None:
        self._folder = Path(folder)
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise JSONRunError(f"{folder} is not an empty folder: give each run a new one, JSONLogger('runs/seed-3')")
        about = {"project": project, "name": name, "group": group, "job_type": job_type or "main"}
        head = {"kind": "run", "format": FORMAT, "version": VERSION, "id": uuid.uuid4().hex[:12], **about}
        line = json.dumps({**head, "config": dict(config or {})}) + "\n"  # a moved folder keeps its identifier
        with explain_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / RUN_FILE, line.encode())
        super().__init__(JSONWriter(self._folder), named=name is not None, pictures=pictures)

    def _no_run_text(self) -> str:
        if self._finished:
            return f"the run in {self._folder} is finished: call finish() last, or log to a new JSONLogger"
        return f"this logger was loaded without its run, which stays in {self._folder}: make a new JSONLogger"


def copy_run(root: Path, writer: Any) -> bool:
    """Copy the logged run in ``root`` to ``writer`` (of W&B); if it was killed, return False, leave the writer open."""
    exit_code: int | None = None
    for line in lines_of(root):
        match line["kind"]:
            case "run":  # read by the caller
                pass
            case "settings":
                writer.describe(line["settings"], line["name"])
            case "metric":
                writer.define(line["metric"], line["axis"])
            case "row":
                writer.log({name: _from_json(root, value) for name, value in line["values"].items()})
            case "texts":
                writer.note(line["texts"])
            case "record":
                writer.keep(UnlearningRecord.load(root / line["path"]))
            case "forget":
                writer.forget(tuple(line["tasks"]))
            case "end":
                exit_code = line["exit_code"]
            case other:
                raise JSONRunError(f"{root / RUN_FILE} has a line of the unknown kind {other!r}")
    if exit_code is not None:
        writer.finish(exit_code)
    return exit_code is not None


def _from_json(folder: Path, value: Any) -> Payload:
    kind = value.get("_type") if isinstance(value, dict) else None
    if kind == "image":
        with Image.open(folder / value["path"]) as image:
            image.load()
            return image
    if kind == "table":
        return Table(tuple(value["columns"]), tuple(tuple(row) for row in value["data"]))
    return float(value["value"] if kind == "number" else value)
