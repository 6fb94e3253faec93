"""A pack written: runs of a study, the states that a store keeps of them, and their records."""

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.audit.signing import private, signature_of
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, lines_of
from avalanche_amnesia.lab.packs.index import BLOBS, INDEX, blobs_of, index_text
from avalanche_amnesia.lab.report.reading import Run
from avalanche_amnesia.lab.runs.measuring import end_of
from avalanche_amnesia.lab.runs.store import RunStore
from avalanche_amnesia.lab.study.experiment import finished
from avalanche_amnesia.saving.files import (
    STATE,
    Part,
    part_content,
    part_name,
    read_part,
    replace_file,
    replacing,
    state_text,
    writing,
)
from avalanche_amnesia.saving.values import StateError

_OF_MODEL = ("strategy", "device", "model")
"""What the body of a reference's state keeps: nobody trains it further."""
_OF_STORE = ("node", "references")
"""What a store adds to the body of a state."""
_BLOB = re.compile(r"[0-9a-f]{64}(\.part)?")


@dataclass(frozen=True)
class Exported:
    """A pack that was written, how many runs and blobs are in it, and the bytes of its files."""

    path: Path
    runs: int
    blobs: int
    nbytes: int


def export_states(
    folders: Sequence[str | Path], to: str | Path, store: RunStore, *, everything: bool = False, key: Any = None
) -> Exported:
    """Pack runs of ``amnesia run`` and ``amnesia sweep``, and their states: the same ones give the same bytes.

    Args:
        folders: of runs, at any depth.
        to: a file ``….zip``, or a folder that is new or a pack; written as a whole or not at all.
        store: that the runs were made with.
        everything: with each run also the strategy with all tasks and no request, and all models that the run was
            measured by: references after every request, noise floors, and full models. Else its end, and the reference
            of that.
        key: private key that signs records, states and the index, as of :meth:`UnlearningRecord.sign`.

    Raises:
        ValueError: if a folder holds no such run, two are alike, or ``to`` holds something else.
        StateError: for a state that the store does not have; nothing was written.
    """
    to = Path(to)
    _refuse_foreign(to)
    found = [run for folder in folders for run in finished(Path(folder))]
    sign = None if key is None else partial(signature_of, private_key=private(key))
    with tempfile.TemporaryDirectory(prefix="amnesia-pack-") as made, store.lock("store"):  # nobody prunes meanwhile
        packing = _Packing(store, Path(made), everything, key, sign)
        lacking = [place for place, _, run in found if not store.has(end_of(run))]
        if lacking:
            raise StateError(
                f"{store.path} does not have how {len(lacking)} of {len(found)} runs ended, such as {lacking[0]}: "
                "give the store that they were made with; of runs that it never had, or that were pruned, delete the "
                "folder and run them again"
            )
        runs = [packing.run(*each) for each in found]
        named = sorted({blob for run in runs for blob in blobs_of(run)})
        blobs = {blob: packing.blobs[blob] for blob in named}
        sizes = {blob: file.stat().st_size for blob, file in blobs.items()}
        text = index_text({"runs": runs, "blobs": sizes}, sign)
        (_write_zip if to.suffix == ".zip" else _write_folder)(to, text, blobs)
    files = [to] if to.is_file() else [to / INDEX, *(to / BLOBS / blob for blob in named)]
    return Exported(to, len(runs), len(blobs), sum(file.stat().st_size for file in files))


class _Packing:
    """Entries of runs, and the blobs that they name."""

    def __init__(self, store: RunStore, made: Path, everything: bool, key: Any, sign: Any) -> None:
        self._store, self._made, self._everything, self._key, self._sign = store, made, everything, key, sign
        self._seen: dict[str, Path] = {}
        self.blobs: dict[str, Path] = {}

    def run(self, place: Path, settings: Mapping[str, Any], run: Run) -> dict[str, Any]:
        """Entry of a run."""
        names = json.dumps([settings[name] for name in ("experiment", "method", "scenario", "seed")], sort_keys=True)
        if names in self._seen:
            raise ValueError(f"{self._seen[names]} and {place} are the same run: give each once")
        self._seen[names] = place
        files = {RUN_FILE: self._add(place / RUN_FILE)}
        for line in lines_of(place):
            if line["kind"] == "record":
                file = place / line["path"]
                signed = None if self._key is None else UnlearningRecord.load(file).sign(self._key).encode()
                files[line["path"]] = self._add(signed or file)
        body, parts = self._store.files(end_of(run))
        trained, keys = body["node"]["trained"], {(of, tuple(tasks)): at for of, tasks, at in body["references"]}
        asked = run.last.unlearned or run.last.parts  # else there is no reference, and without tasks an untrained one
        wanted = [("same", run.last.remaining)] if asked and run.last.remaining else []
        if self._everything:
            wanted = [each for each in keys if each[1]]
        # Where samples went, the models over all tasks are without them.
        before = keys.get(("same", tuple(trained))) if self._everything and not run.last.parts else None
        return {
            "settings": settings,
            "versions": dict(run.versions),
            "claim": run.last.claim,
            "trained": trained,
            "unlearned": run.last.unlearned,
            "remaining": run.last.remaining,
            "files": files,
            "end": self._state(body, parts),
            **({} if before is None else {"before": self._state(*self._files(before, place))}),
            "references": [
                {"variant": variant, "tasks": tasks, "model": self._model(keys.get((variant, tasks)), place)}
                for variant, tasks in wanted
            ],
        }

    def _files(self, key: str | None, place: Path) -> tuple[dict[str, Any], dict[str, Path]]:
        if key is None or not self._store.has(key):
            raise StateError(
                f"{self._store.path} no longer has a model that {place} was measured by: delete that folder, and run "
                "it again"
            )
        return self._store.files(key)

    def _model(self, key: str | None, place: Path) -> dict[str, str]:
        """State of a reference: the model alone."""
        body, parts = self._files(key, place)
        kept: dict[str, Path] = {at: file for at, file in parts.items() if at.startswith("model.")}
        if "state" in parts:
            own = read_part(parts["state"]).items()
            content = part_content(Part({name: tensor for name, tensor in own if name.startswith("model.")}))
            kept["state"] = self._made / part_name(content)
            kept["state"].write_bytes(content)
        return self._state({name: body[name] for name in _OF_MODEL}, kept)

    def _state(self, body: Mapping[str, Any], parts: Mapping[str, Path]) -> dict[str, str]:
        """Files of a state → blob."""
        kept = {name: of for name, of in body.items() if name not in _OF_STORE}
        text = state_text(kept, {place: file.name for place, file in parts.items()}, self._sign)
        files = {file.name: self._add(file) for file in sorted(set(parts.values()))}
        for name, blob in files.items():
            if not name.startswith(blob[:32]):
                raise StateError(f"{self._store.path}: {name} is damaged: prune the store, and run again")
        return {STATE: self._add(text.encode()), **files}

    def _add(self, content: bytes | Path) -> str:
        """Name of a blob."""
        blob = hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).hexdigest()
        if isinstance(content, bytes):
            file = self._made / blob
            file.write_bytes(content)
            content = file
        self.blobs.setdefault(blob, content)
        return blob


def _refuse_foreign(to: Path) -> None:
    """Raise unless a pack may be written there."""
    if to.suffix == ".zip":
        if to.is_dir():
            raise ValueError(f"{to} is a folder: name a file, or a folder that does not end in .zip")
    elif to.is_file():
        raise ValueError(f"{to} is a file: name one that ends in .zip, or a folder")
    elif to.is_dir():
        others = sorted({file.name for file in to.iterdir()} - {INDEX, f"{INDEX}.part", BLOBS})
        if others:
            raise ValueError(f"{to} holds {others[:3]}, which are no part of a pack: name a new folder")


def _write_zip(to: Path, text: str, blobs: Mapping[str, Path]) -> None:
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
    with writing(to), replacing(to) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        contents = ((f"{BLOBS}/{blob}", file.read_bytes()) for blob, file in blobs.items())
        for name, content in chain([(INDEX, text.encode())], contents):
            info = zipfile.ZipInfo(name)  # without the time, so that the same content gives the same bytes
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(info, content, compresslevel=9)


def _write_folder(to: Path, text: str, blobs: Mapping[str, Path]) -> None:
    """Write blobs that are new, then the index, then take away what it does not name: killed, there is a whole pack."""
    folder = to / BLOBS
    with writing(to):
        folder.mkdir(parents=True, exist_ok=True)
        for blob, file in blobs.items():
            content = file.read_bytes()
            there = folder / blob
            if not there.is_file() or there.read_bytes() != content:
                replace_file(there, content)
        replace_file(to / INDEX, text.encode())
        for file in folder.iterdir():
            if file.name not in blobs and _BLOB.fullmatch(file.name):
                file.unlink()
