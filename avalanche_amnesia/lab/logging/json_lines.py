"""Logger that writes a run as JSON lines, with no other process; `amnesia sync` sends such runs to W&B.

A run is a folder: `run.jsonl`, of which each line is one JSON object with its `kind`, and beside it `media/` (PNG) and
`records/` (JSON). Lines are appended whole and flushed; a run that was killed leaves what it has logged. At most its
last line is cut: readers leave it out.
"""

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.lab.logging.run_lines import FORMAT, RUN_FILE, VERSION, JSONRunError, lines_of
from avalanche_amnesia.logging.payloads import Histogram, Payload
from avalanche_amnesia.logging.run_logger import DEFAULT_PROJECT, RunLogger, RunWriter, refuse_one_string
from avalanche_amnesia.saving.files import replace_file, writing

_FILES = {"media": "png", "records": "json"}
"""Folder beside the log → ending of its files."""


class JSONWriter(RunWriter):
    """Writes to a run's folder, behind what is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _cut_broken_line(folder / RUN_FILE)
        self._file = (folder / RUN_FILE).open("a", encoding="utf-8")
        self._n = {kind: sum(1 for _ in folder.glob(f"{kind}/*.{ending}")) for kind, ending in _FILES.items()}

    def describe(self, settings: Mapping[str, Any], name: str | None) -> None:
        """Add a line of settings, which count where no earlier line says otherwise."""
        self._append("settings", settings=settings, name=name)

    def define(self, metric: str, axis: str) -> None:
        """Add a line that names the axis."""
        self._append("metric", metric=metric, axis=axis)

    def log(self, row: Mapping[str, Payload]) -> None:
        """Add a row; its pictures are files before it is there."""
        self._append("row", time=round(time.time(), 3), values={name: self._as_json(v) for name, v in row.items()})

    def note(self, texts: Mapping[str, str]) -> None:
        """Add a line of texts."""
        self._append("texts", texts=dict(texts))

    def keep(self, record: UnlearningRecord) -> None:
        """Save a record to a file of its own."""
        self._append("record", path=self._saved("records", record))

    def use(self, record: UnlearningRecord) -> None:
        """Save the record that this run is about; it is the input of the run once that is sent to W&B."""
        self._append("input", path=self._saved("records", record))

    def forget(self, tasks: tuple[int, ...]) -> None:
        """Add a line: values so far of these tasks are not in the summary."""
        self._append("forget", tasks=list(tasks))

    def finish(self, exit_code: int) -> None:
        """Add the last line."""
        self._append("end", exit_code=exit_code)
        self._file.close()

    def _append(self, kind: str, **content: Any) -> None:
        line = json.dumps({"kind": kind, **content}) + "\n"
        with writing(self.folder):  # what has no room waits in the file's buffer
            self._file.write(line)
            self._file.flush()

    def _saved(self, kind: str, content: Image.Image | UnlearningRecord) -> str:
        """Path of one more file."""
        self._n[kind] += 1
        path = f"{kind}/{self._n[kind]}.{_FILES[kind]}"
        (self.folder / kind).mkdir(exist_ok=True)
        content.save(self.folder / path)
        return path

    def _as_json(self, value: Payload) -> Any:
        if isinstance(value, Image.Image):
            path = self._saved("media", value)
            return {"_type": "image", "path": path, "width": value.width, "height": value.height}
        if isinstance(value, Histogram):
            return {"_type": "histogram", "values": value.counts.tolist(), "bins": value.edges.tolist()}
        if isinstance(value, Table):
            return {"_type": "table", "columns": list(value.columns), "data": [list(row) for row in value.rows]}
        if isinstance(value, float) and not math.isfinite(value):
            return {"_type": "number", "value": str(value)}  # JSON has no such number
        return value


class JSONLogger(RunLogger):
    """Logs a run as JSON lines into a folder: what :class:`RunLogger` says, pictures as PNG, records as files.

    There is no process beside it, which is what many short runs want: log to JSON first, and `amnesia sync` the folders
    to W&B when they are worth it. A pickled logger leaves its run behind; give the loaded one a folder with `attach`.

    Args:
        folder: of this run, new or empty; made if missing.
        project: W&B project that it is sent to.
        name: its name; None: method and seed of the strategy.
        group: its group, e.g. one experiment with several seeds.
        job_type: its part in the group: "main", "reference", "full", "audit", or another word.
        config: further settings of it, beside those of the strategy.
        tags: its tags.
        pictures: whether the package's own pictures are drawn and kept; the tables behind them always are.

    Raises:
        JSONRunError: the folder is a file, or holds something.
        TypeError: `tags` is one string, or `config` holds what JSON has no place for.
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
        tags: Sequence[str] = (),
        pictures: bool = True,
    ) -> None:
        refuse_one_string(tags)
        self._folder = Path(folder)
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise JSONRunError(
                f"{folder} is not an empty folder: give each run a new one, e.g. JSONLogger('runs/seed-3')"
            )
        about = {"project": project, "name": name, "group": group, "job_type": job_type or "main", "tags": list(tags)}
        head = {"kind": "run", "format": FORMAT, "version": VERSION, "id": uuid.uuid4().hex[:12], **about}
        line = json.dumps({**head, "config": dict(config or {})}) + "\n"  # the identifier goes where the folder goes
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / RUN_FILE, line.encode())
        super().__init__(JSONWriter(self._folder), named=name is not None, pictures=pictures)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._folder

    def attach(self, folder: str | Path) -> None:
        """Log to the run in a folder from now on, behind its last whole line; for a logger that was loaded without it.

        Args:
            folder: of a run that a JSONLogger began.

        Raises:
            JSONRunError: no run is there.
            RuntimeError: the logger has a run already.
        """
        if self._writer is not None:
            raise RuntimeError(f"this logger writes to {self._folder}: make another JSONLogger for {folder}")
        for _ in lines_of(Path(folder)):  # all of it can be read, or nothing is added
            pass
        self._continue_in(JSONWriter(Path(folder)))
        self._folder = Path(folder)

    def _missing(self) -> str:
        if self._finished:
            return (
                f"the run in {self._folder} is finished and takes no more values: "
                "call finish() last, or log to a new JSONLogger"
            )
        return f"this logger was loaded without its run: attach({str(self._folder)!r}) goes on in it"


def replay(root: Path, writer: RunWriter) -> bool:
    """Write a run of JSON lines once more; False where it was killed, so that the writer is not finished."""
    exit_code: int | None = None
    for line in lines_of(root):
        match line["kind"]:
            case "run":  # who made the writer has read it
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
            case "input":
                writer.use(UnlearningRecord.load(root / line["path"]))
            case "forget":
                writer.forget(tuple(line["tasks"]))
            case "end":
                exit_code = line["exit_code"]
            case other:
                raise JSONRunError(f"{root / RUN_FILE} has a line of the unknown kind {other!r}")
    if exit_code is not None:
        writer.finish(exit_code)
    return exit_code is not None


def _cut_broken_line(file: Path) -> None:
    """Take away what a killed writer left of its last line, so that the next one stands on its own."""
    with file.open("r+b") as stream:
        content = stream.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            stream.truncate(end)


def _from_json(folder: Path, value: Any) -> Payload:
    kind = value.get("_type") if isinstance(value, dict) else None
    if kind == "image":
        with Image.open(folder / value["path"]) as image:
            image.load()
            return image
    if kind == "histogram":
        return Histogram(np.array(value["values"]), np.array(value["bins"]))
    if kind == "table":
        return Table(tuple(value["columns"]), tuple(tuple(row) for row in value["data"]))
    return float(value["value"] if kind == "number" else value)
